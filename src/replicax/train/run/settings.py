"""The arguments of a run, checked once, and what follows from them alone."""

import dataclasses
from pathlib import Path
from typing import Any

from replicax.errors import ConfigError
from replicax.train.files.places import exists, writing
from replicax.train.files.records import CONFIG, plain_config
from replicax.train.folder.saving import Saving
from replicax.train.guarded import Guard
from replicax.train.run.evaluator import Evaluation
from replicax.train.run.stopping import Interrupt
from replicax.train.run.summary import plain_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of an `rx.Run`, which documents them, but for its objects.

    These are its `dp`, `state`, `source` and `hooks`, which become others when the run is made.
    """

    batch_size: int | None
    epochs: int | None
    steps: int | None
    evaluation: Evaluation | None
    shuffle: bool
    seed: int
    prefetch: int | None
    steps_per_call: int | None
    log_every: int | None
    guard: Guard
    run_dir: Path | None
    saving: Saving
    accept_changes: bool
    config: dict[str, Any]
    progress: bool
    interrupt: Interrupt | None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"epochs={self.epochs} and steps={self.steps}; a run has exactly one length: pass "
                "one of them"
            )

    @property
    def resumable(self) -> bool:
        """Whether the run saves checkpoints."""
        return self.run_dir is not None and self.saving.wanted

    def agreed(self) -> dict[str, Any]:
        """Return, as plain values, what must be the same in all processes."""
        names = "epochs", "steps", "batch_size", "log_every", "steps_per_call"
        return {
            **{name: getattr(self, name) for name in names},
            **plain_fields(guard=self.guard, saving=self.saving, evaluation=self.evaluation),
            **plain_config(self.config),
        }

    def looks(self, hooks: dict[str, int]) -> dict[str, int]:
        """Return the steps between two after which the state is looked at, by who does.

        `hooks` are the intervals of the hooks.
        """
        every = {
            "rx.Evaluation": self.evaluation and self.evaluation.every_steps,
            "rx.Saving": self.resumable and self.saving.every,
            "prefetch=0": self.prefetch == 0,
        }
        return hooks | {name: int(steps) for name, steps in every.items() if steps}

    def is_known(self) -> bool:
        """Whether an earlier start left a run from which this one can resume."""
        if self.run_dir is None or not self.resumable:
            return False
        with writing(self.run_dir):
            return exists(self.run_dir / CONFIG)

"""`WandB`: the records of a run at Weights & Biases."""

import secrets
from typing import Any

from replicax.errors import require
from replicax.train.hook import Running
from replicax.train.hooks.folder import on_disk
from replicax.train.loggers.logger import Logger, Start, scalars
from replicax.train.records import Record

STEP = "step"

INIT_SECONDS = 20
"""For an answer; after that the next record tries again."""


class WandB(Logger):
    """Sends metrics and figures by step, and the configuration, to Weights & Biases.

    A run that is started again goes on as the same run there, whose id is in the checkpoints. What
    a killed start did after its last checkpoint is then there twice, with the same numbers.

    Example:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x",
        ...        hooks=[rx.WandB("digits", tags=["first"])])

    Args:
        project: the project.
        init: what else `wandb.init` takes, `mode="offline"` say.

    Raises:
        MissingDependencyError: in a run, wandb is not installed.
        ConfigError: in a run whose folder is in an object store, no `dir`.
    """

    package = "wandb"

    def __init__(self, project: str | None = None, **init: Any) -> None:
        self._init = {"project": project, **init}
        self._id: str | None = None
        self._run: Any = None

    def start(self, run: Running) -> None:
        self._id = self._init.get("id") or self._id or secrets.token_hex(4)
        if run.folder is not None:
            on_disk(run, self._init.get("dir"), "wandb", "WandB()")
        super().start(run)

    def open(self, start: Start) -> None:
        wandb = require("wandb", "loggers")
        given = {"dir": start.folder, "config": start.config, "resume": "allow"}
        # By default 90 s, which the process would wait as it ends where nobody answers.
        settings = wandb.Settings(init_timeout=INIT_SECONDS)
        self._run = wandb.init(**{**given, "settings": settings, **self._init, "id": self._id})
        # Its own steps cannot go back, as a run that goes on from a checkpoint does.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, record: Record) -> None:
        self._run.log({STEP: record.step, **scalars(record)})

    def close(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)

    def end(self, run: Running) -> None:
        super().end(run)
        self._id = None  # of this run; there may be another

    def save_state(self) -> Any:
        return self._id

    def load_state(self, state: Any) -> None:
        self._id = state

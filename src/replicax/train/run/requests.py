"""A run as its hooks see it: where it is, and what they may request of it."""

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from replicax.core.ground.train_state import TrainState
from replicax.errors import ConfigError
from replicax.text.streams import alarm
from replicax.train.checkpoints.manifest import Position
from replicax.train.dispatched import RunPosition
from replicax.train.files.records import Record
from replicax.train.folder.storage import Storage
from replicax.train.hooks.hook import Hooks, Running
from replicax.train.hooks.progress import Progress
from replicax.train.run.evaluator import Evaluator
from replicax.train.run.members import Members
from replicax.train.run.run_state import RunState
from replicax.train.run.stopping import Stopping


class Requests(Running):
    """Requests of hooks to a run; its only subclass, the loop, does them between two calls."""

    state: TrainState
    hooks: Hooks
    resumable: bool
    _evaluator: Evaluator | None
    _run_state: RunState
    _storage: Storage | None
    _display: Progress
    _stopping: Stopping
    _members: Members

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._good: tuple[Position, dict[str, Any], float, Callable[[], Any]] | None = None
        """The last known good state, which a hook keeps: its position and the rest of it, its time,
        and the checksums of its last batch."""
        self._good_at: float | None = None
        self._back: tuple[TrainState, str, dict[str, float]] | None = None
        """The state a hook asked to go back to, the reason, and metrics for its record."""
        self._waits = False

    @property
    def place(self) -> RunPosition:
        return self._run_state.place

    @property
    def rows(self) -> int:
        """Rows trained on in the whole run."""
        return self._run_state.rows

    @property
    def is_main(self) -> bool:
        return self._members.is_main

    @property
    def folder(self) -> Path | None:
        return None if self._storage is None or not self.is_main else self._storage.path

    def evaluation_metrics(self) -> Collection[str] | None:
        return () if self._evaluator is None else self._evaluator.metrics(self.state)

    def say(self, line: str) -> None:
        self._display.line(line)

    def alarm(self, line: str) -> None:
        job = self.dp.job
        alarm(line, f"process {job.process}: " if job.processes > 1 else "")

    def keep(self, record: Record) -> None:
        self.records.append(record)
        self.hooks("record", self, record)

    def stop(self, why: str) -> None:
        self._stopping.stop(why)

    def save(self) -> None:
        """Request a checkpoint.

        Raises:
            ConfigError: the run does not save checkpoints.
        """
        if not self._resumable:
            raise ConfigError(
                "a checkpoint was requested, but the run does not save any; pass a run_dir, and a "
                "Saving with steps or minutes"
            )
        self._stopping.save()

    def evaluate(self) -> None:
        self._stopping.evaluate()

    def wait(self) -> None:
        self._waits = True

    def note_good(self) -> None:
        self._good_at = time.monotonic()

    def go_back(
        self, state: TrainState, place: RunPosition, why: str, metrics: dict[str, float]
    ) -> None:
        assert self._good is not None
        assert self._good[0].step == place.step
        self._back = state, why, metrics

    @property
    def _resumable(self) -> bool:
        return self._storage is not None and self.resumable

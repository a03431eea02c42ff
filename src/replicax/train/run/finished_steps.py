"""Steps that have finished: shown to the hooks, recorded, and undone if a hook goes back."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from replicax.core.ground.train_state import TrainState
from replicax.train.checkpoints.manifest import Position
from replicax.train.dispatched import RunPosition, finished
from replicax.train.files.records import Record
from replicax.train.folder.goodput import Ledger
from replicax.train.run.run_parts import RunParts


@dataclasses.dataclass(frozen=True)
class _Good:
    """A place to go back to, without its state, which the hook keeps that noted it."""

    position: Position
    extra: dict[str, Any]
    noted_at: float
    last_batch: Callable[[], Any]
    """Returns its checksums."""


class FinishedSteps:
    """Does what follows the end of a step, in order, some steps after it was dispatched."""

    def __init__(self, parts: RunParts, ledger: Callable[[], Ledger]) -> None:
        self._parts, self._now, self._hooks, self._ledger = parts, parts.now, parts.hooks, ledger
        self._noted_at: float | None = None
        self._good: _Good | None = None
        self._back: tuple[TrainState, str, dict[str, float]] | None = None
        """The state a hook asked to go back to, the reason, and metrics for its record."""

    def note_good(self) -> None:
        """Note the current position, once its records are written, as one to go back to."""
        self._noted_at = time.monotonic()

    def go_back(
        self, state: TrainState, place: RunPosition, why: str, metrics: dict[str, float]
    ) -> None:
        """Request to continue from the noted position, with the `state` of then."""
        assert self._good is not None
        assert self._good.position.step == place.step
        self._back = state, why, metrics

    def follow(self, may_remain: int, *, closing: bool = False, due: bool = False) -> None:
        """Process the finished steps; a hook may then ask the run to go back.

        Args:
            may_remain: number of newest calls not to wait for.
            closing: whether the epoch or the run ends here, which adds a record. A run that is
                interrupted adds none, so that a resumed run writes the same records.
            due: whether the state is about to be saved or evaluated, or the run to end.
        """
        now, made = self._now, list[Record]()
        for steps in finished(now.job.in_flight, may_remain, now.meter.interval):
            made += now.bad_steps.finished(steps)
            if self._hooks.has("step"):
                for step in steps.steps():
                    self._hooks("step", step)
            made += map(self._with_figures, now.meter.finished(steps))
        self._hooks("settle", due)
        if self._back is not None:  # the records would be of steps that are discarded
            return
        if closing:
            made += map(self._with_figures, now.meter.flush())
        for record in made:
            self._parts.keep(record)
        now.bad_steps.check()  # raises, so not before the steps that it names are recorded
        if self._noted_at is not None:
            self._good = _Good(now.position(), now.extra(), self._noted_at, now.reread.last)
            self._noted_at = None

    def settle(self, *, closing: bool = False, due: bool = True) -> bool:
        """Wait for all steps and process them; return whether the run went back."""
        self.follow(0, closing=closing, due=due)
        return self.went_back()

    def went_back(self) -> bool:
        """Go back to the position a hook asked for, if any, and discard the steps after it."""
        if self._back is None:
            return False
        (state, why, metrics), self._back = self._back, None
        assert self._good is not None
        now, good = self._now, self._good
        position = good.position
        lost = now.place.step - position.step
        self._parts.say(f"restored step {position.step:,}, {lost} steps back: {why}")
        self._ledger().move("productive", "lost", time.monotonic() - good.noted_at)
        now.load_state(position, good.extra)
        now.state, now.reread.last = state, good.last_batch
        self._hooks("rewound")  # cuts the file to the records of then, before this one is added
        metrics = {"steps_lost": float(lost), **metrics}
        self._parts.keep(Record("restore", position.step, position.epoch, metrics, 0, 0.0))
        self._good = dataclasses.replace(good, position=now.position())  # has one record more
        return True

    def _with_figures(self, record: Record) -> Record:
        """Return `record` with the hooks' figures, before they see any later step."""
        return dataclasses.replace(record, figures=self._hooks.figures(record) or None)

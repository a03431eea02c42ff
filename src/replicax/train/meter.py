"""Records of the steps that have finished, and the rates between two of them."""

import time

import jax

from replicax.train.dispatched import Dispatched
from replicax.train.records import Record


class Meter:
    """Follows the steps as they finish; gives a `Record` every `log_every` of them."""

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._last: Dispatched | None = None  # which has no record yet
        self._rows = 0
        self._wait_seconds = 0.0
        self._seconds = 0.0
        self._resumed = False
        self._started: float | None = None

    @property
    def is_timing(self) -> bool:
        """Whether the clock runs: the first step, which compiles, is not to be timed."""
        return self._started is not None

    def finished(self, step: Dispatched) -> list[Record]:
        """Return the record of a step that has finished, if one is due.

        Args:
            step: the next one; the first one with no other behind it, since it starts the clock.
        """
        self._rows += step.rows or 0
        self._last = step
        is_first = not (self._resumed or self.is_timing)
        records = self.flush() if is_first or step.place.step % self._log_every == 0 else []
        if self._started is None:
            self._started = time.perf_counter() - self._seconds
        return records

    def add_wait(self, seconds: float) -> None:
        """Note that the loop waited for a batch."""
        self._wait_seconds += seconds

    def flush(self) -> list[Record]:
        """Return a record of the last step, if it has none."""
        step, self._last = self._last, None
        if step is None:
            return []
        now = time.perf_counter()
        seconds = self._seconds if self._started is None else now - self._started
        waited = min(self._wait_seconds / seconds, 1.0) if seconds > 0 else None
        metrics = {name: float(value) for name, value in jax.device_get(step.metrics).items()}
        at = step.place
        record = Record("train", at.step, at.epoch, metrics, self._rows, seconds, waited)
        self._rows, self._wait_seconds, self._started = 0, 0.0, now
        return [record]

    @property
    def unrecorded(self) -> tuple[int, float]:
        """Rows of finished steps that no record has yet, and their seconds."""
        if self._started is None:
            return self._rows, self._seconds
        return self._rows, time.perf_counter() - self._started

    def rewind(self, rows: int, seconds: float, *, resumed: bool, compiled: bool) -> None:
        """Stand where `unrecorded` was `(rows, seconds)`, and forget what came after it.

        Args:
            rows: that no record has yet.
            seconds: theirs.
            resumed: whether there were steps before it.
            compiled: whether the next step need not be compiled.
        """
        self._last = None
        self._rows, self._seconds, self._wait_seconds = rows, seconds, 0.0
        self._resumed = resumed
        self._started = time.perf_counter() - seconds if compiled else None

    def leave_out(self, seconds: float) -> None:
        """Take what has just lasted `seconds`, an evaluation say, out of the steps' time."""
        if self._started is not None:
            self._started += seconds

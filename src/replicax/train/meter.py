"""Records of the steps that have finished, and the rates between two of them."""

import math
import time
from typing import Any

from replicax.train.dispatched import Dispatched
from replicax.train.records import Record


class Meter:
    """Follows the steps as they finish; gives a `Record` every `log_every` of them.

    Its metrics are means over the steps since the last record, each step counted by its real rows.
    A step that was skipped, which has a record of its own, is left out, and so is a metric that is
    not finite: where that leaves none, the mean is NaN. Step 1 has a record of its own.
    """

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._last: Dispatched | None = None  # which has no record yet
        self._rows = 0
        self._sums: dict[str, list[float]] = {}  # name -> sum over rows, and how many they were
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
        self._add(step)
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
        """Return a record up to the last step, if it has none."""
        step, self._last = self._last, None
        if step is None:
            return []
        now = time.perf_counter()
        seconds = self._seconds if self._started is None else now - self._started
        waited = min(self._wait_seconds / seconds, 1.0) if seconds > 0 else None
        metrics = {name: _mean(*self._sums[name]) for name in step.metrics}
        at = step.place
        record = Record("train", at.step, at.epoch, metrics, self._rows, seconds, waited)
        self._rows, self._sums, self._wait_seconds, self._started = 0, {}, 0.0, now
        return [record]

    @property
    def unrecorded(self) -> tuple[int, float]:
        """Rows of finished steps that no record has yet, and their seconds."""
        if self._started is None:
            return self._rows, self._seconds
        return self._rows, time.perf_counter() - self._started

    def save_state(self) -> dict[str, Any]:
        """Return what the next record is to have of the steps up to here, as JSON has it."""
        rows, seconds = self.unrecorded
        sums = {name: list(each) for name, each in self._sums.items()}
        return {"rows": rows, "seconds": seconds, "sums": sums}

    def rewind(self, state: dict[str, Any], *, resumed: bool, compiled: bool) -> None:
        """Stand where `save_state` returned `state`, and forget what came after it.

        Args:
            state: empty for nothing; without `sums`, the metrics of what follows alone are known.
            resumed: whether there were steps before it.
            compiled: whether the next step need not be compiled.
        """
        self._last = None
        self._rows, self._seconds = state.get("rows", 0), state.get("seconds", 0.0)
        self._sums = {name: list(each) for name, each in state.get("sums", {}).items()}
        self._wait_seconds = 0.0
        self._resumed = resumed
        self._started = time.perf_counter() - self._seconds if compiled else None

    def leave_out(self, seconds: float) -> None:
        """Take what has just lasted `seconds`, an evaluation say, out of the steps' time."""
        if self._started is not None:
            self._started += seconds

    def _add(self, step: Dispatched) -> None:
        rows = step.rows or 0
        self._rows += rows
        skipped = step.skipped
        for name, metric in step.metrics.items():
            value = float(metric)  # `jax.device_get` of all of them takes twice as long
            counted = 0 if skipped or not math.isfinite(value) else rows
            sums = self._sums.setdefault(name, [0.0, 0])
            if counted:
                sums[0] += counted * value
                sums[1] += counted


def _mean(total: float, rows: float) -> float:
    return total / rows if rows else math.nan

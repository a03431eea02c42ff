"""Metrics that are read some steps late, and the rates between two readings."""

import dataclasses
import time
from collections import deque

import jax

from replicax.core.in_flight import STEPS_IN_FLIGHT
from replicax.core.update import Metrics
from replicax.train.records import Record


@dataclasses.dataclass(frozen=True)
class _Dispatched:
    step: int
    epoch: int
    rows: int
    metrics: Metrics


class Meter:
    """Follows the steps; gives a `Record` every `log_every` of them."""

    def __init__(self, log_every: int) -> None:
        self._log_every = log_every
        self._in_flight: deque[_Dispatched] = deque()
        self._rows = 0
        self._wait_seconds = 0.0
        self._seconds = 0.0
        self._resumed = False
        self._started: float | None = None

    def add(self, step: int, epoch: int, rows: int, metrics: Metrics) -> list[Record]:
        """Note that `step` was dispatched; records of steps that have finished since."""
        self._in_flight.append(_Dispatched(step, epoch, rows, metrics))
        if self._started is None:  # the first step compiles: wait for it, and start the clock
            jax.block_until_ready(metrics)
            records = self.settle() if self._resumed else self.flush()
            if self._started is None:
                self._started = time.perf_counter() - self._seconds
            return records
        return self._finish(STEPS_IN_FLIGHT)

    def add_wait(self, seconds: float) -> None:
        """Note that the loop waited for a batch."""
        self._wait_seconds += seconds

    def flush(self) -> list[Record]:
        """Wait for all steps; their records, one of the last step among them."""
        return self._finish(0)

    def settle(self) -> list[Record]:
        """Wait for all steps; the records that are due."""
        records = self._finish(1)
        if self._in_flight and self._in_flight[0].step % self._log_every == 0:
            records += self._finish(0)
        return records

    @property
    def unrecorded(self) -> tuple[int, float]:
        """Rows that no record has yet, and their seconds."""
        rows = self._rows + sum(done.rows for done in self._in_flight)
        if self._started is None:
            return rows, self._seconds
        return rows, time.perf_counter() - self._started

    def rewind(self, rows: int, seconds: float, *, resumed: bool, compiled: bool) -> None:
        """Stand where `unrecorded` was `(rows, seconds)`, and forget what came after it.

        Args:
            rows: that no record has yet.
            seconds: theirs.
            resumed: whether there were steps before it.
            compiled: whether the next step need not be compiled.
        """
        self._in_flight.clear()
        self._rows, self._seconds, self._wait_seconds = rows, seconds, 0.0
        self._resumed = resumed
        self._started = time.perf_counter() - seconds if compiled else None

    def leave_out(self, seconds: float) -> None:
        """Take what has just lasted `seconds`, an evaluation say, out of the steps' time."""
        if self._started is not None:
            self._started += seconds

    def _finish(self, may_remain: int) -> list[Record]:
        records: list[Record] = []
        while len(self._in_flight) > may_remain:
            done = self._in_flight.popleft()
            jax.block_until_ready(done.metrics)
            self._rows += done.rows
            last = not may_remain and not self._in_flight
            if done.step % self._log_every == 0 or last:
                records.append(self._record(done))
        return records

    def _record(self, done: _Dispatched) -> Record:
        now = time.perf_counter()
        seconds = self._seconds if self._started is None else now - self._started
        waited = min(self._wait_seconds / seconds, 1.0) if seconds > 0 else None
        metrics = {name: float(value) for name, value in jax.device_get(done.metrics).items()}
        record = Record("train", done.step, done.epoch, metrics, self._rows, seconds, waited)
        self._rows, self._wait_seconds, self._started = 0, 0.0, now
        return record

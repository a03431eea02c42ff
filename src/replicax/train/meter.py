"""Metrics that are read some steps late, and the rates between two readings."""

import dataclasses
import time
from collections import deque

import jax

from replicax.parallel.step import STEPS_IN_FLIGHT
from replicax.parallel.update import Metrics
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
        self._started: float | None = None

    def add(self, step: int, epoch: int, rows: int, metrics: Metrics) -> list[Record]:
        """Note that `step` was dispatched; records of steps that have finished since."""
        self._in_flight.append(_Dispatched(step, epoch, rows, metrics))
        if self._started is None:  # the first step compiles: wait for it, and start the clock
            return self.flush()
        return self._finish(STEPS_IN_FLIGHT)

    def add_wait(self, seconds: float) -> None:
        """Note that the loop waited for a batch."""
        self._wait_seconds += seconds

    def flush(self) -> list[Record]:
        """Wait for all steps; their records, one of the last step among them."""
        return self._finish(0)

    def settle(self) -> tuple[list[Record], int]:
        """Wait for all steps; the records that are due, and the rows that no record has yet."""
        records = self._finish(1)
        if self._in_flight and self._in_flight[0].step % self._log_every == 0:
            records += self._finish(0)
        return records, self._rows + sum(done.rows for done in self._in_flight)

    def rewind(self, step: int, rows: int) -> None:
        """Forget what came after `step`, where `settle` returned `rows`."""
        self._in_flight.clear()
        self._rows, self._wait_seconds = rows, 0.0
        self._started = time.perf_counter() if step else None

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
        seconds = 0.0 if self._started is None else now - self._started
        waited = min(self._wait_seconds / seconds, 1.0) if seconds > 0 else None
        metrics = {name: float(value) for name, value in jax.device_get(done.metrics).items()}
        record = Record("train", done.step, done.epoch, metrics, self._rows, seconds, waited)
        self._rows, self._wait_seconds, self._started = 0, 0.0, now
        return record

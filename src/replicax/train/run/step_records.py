"""Records of finished steps: means over an interval, and skipped updates, up to a limit."""

import math
import time
from collections.abc import Sequence
from typing import Any

from replicax.core.between.every_round import ROUND_LOSS
from replicax.core.data.merged import Merged, Merging, named_values
from replicax.core.ground.job import Job
from replicax.core.step.loss import LOSS
from replicax.errors import DivergedError, LossError
from replicax.train.dispatched import Dispatched, Finished
from replicax.train.files.records import Record
from replicax.train.guarded import SPIKE

_READ_TOGETHER = 64
"""Steps of which the metrics are read at once, if there is no record before."""
_FEWEST_RECORDS, _INTERVALS = 20, (50, 20, 10, 5, 2, 1)
_NAMED = 8  # examples listed in a message; the record has all of them


def log_interval(total: int | None) -> int:
    """Return the steps between two records of a run of `total` steps, if known; no clock decides.

    At most 50, and in a shorter run as many as give it `_FEWEST_RECORDS`.
    """
    most = max((total or 10**9) // _FEWEST_RECORDS, 1)
    return next(steps for steps in _INTERVALS if steps <= most)


class MergedOfSteps:
    """The metrics that are no means of the steps since the last record.

    A metric that grows with the rows is that of the last step: all rows of an interval would have
    to be kept, and to be in every checkpoint.
    """

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        """Continue after `save_state` returned `state`."""
        self._saved = dict(state or {})
        self._merging: dict[str, Merging] = {}

    def add(self, name: str, metric: Merged) -> None:
        """Merge the metric of a finished step."""
        if metric.grows:
            self._merging[name] = Merging()
        elif name in self._saved:
            self._merging[name] = Merging.resumed(self._saved.pop(name), metric)
        self._merging.setdefault(name, Merging()).add(metric)

    def values(self) -> dict[str, float]:
        """Return the numbers of each metric."""
        numbers: dict[str, float] = {}
        for name, merging in self._merging.items():
            numbers |= recorded(named_values(name, merging.compute()))
        return numbers

    def save_state(self) -> dict[str, Any]:
        """Return, as JSON values, what the next record needs from the steps so far."""
        merged = {name: m.save_state() for name, m in self._merging.items() if not m.grows}
        return self._saved | merged


class Meter:
    """Tracks finished steps; returns a `Record` every `log_every` steps.

    Its metrics are means over the steps since the last record, weighted by their real rows, but for
    a `StepFigure` with `latest`, which has its last value. Skipped steps, which have separate
    records, and non-finite metrics are excluded; if no value remains, the mean is NaN, and a figure
    or the loss of rounds is left out. Step 1 has a separate record. Metrics that are no means are
    merged over these steps; see `MergedOfSteps`.
    """

    _last: Finished | None  # the newest steps, if they have no record yet
    _sums: dict[str, list[float]]  # name -> sum over rows, and their number; or the last value, 1
    _started: float | None
    _reached: float  # when the last step finished
    _together: tuple[int, float]  # steps that had finished with it, and the seconds of each
    _wait_seconds: float
    _merged: MergedOfSteps
    rows: int
    """Rows of finished steps that are not in a record yet."""

    def __init__(self, log_every: int) -> None:
        self.interval = log_every
        """Steps between two records."""
        self.rewind({}, resumed=False, compiled=False)

    @property
    def is_timing(self) -> bool:
        """Whether steps are being timed; the first step, which compiles, is not."""
        return self._started is not None

    def finished(self, steps: Finished) -> list[Record]:
        """Return the record of steps that have finished, if one is due after the last of them.

        Args:
            steps: the next steps. No step may be dispatched after the first one before this call,
                which starts the clock. Steps that are `ready` at once share the time since the last
                one before them, as when each of them finished is not known.
        """
        sharing, seconds = self._together
        if not sharing:
            sharing = steps.ready
            seconds = (time.perf_counter() - self._reached) / sharing
        self._reached += len(steps) * seconds
        self._together = sharing - len(steps), seconds
        self.rows += sum(steps.rows)
        self._unread.append(steps)
        if len(self._unread) >= _READ_TOGETHER:
            self._read()
        self._last = steps
        is_first = not (self._resumed or self.is_timing)
        due = is_first or steps.place.step % self.interval == 0
        records = self.flush() if due else []
        if self._started is None:
            self._start()
        return records

    def add_wait(self, seconds: float) -> None:
        self._wait_seconds += seconds

    def leave_out(self, seconds: float) -> None:
        """Exclude the last `seconds`, such as an evaluation, from the steps' time."""
        if self._started is not None:
            self._started += seconds
            self._reached += seconds

    def flush(self) -> list[Record]:
        """Return a record up to the last step, if it has none."""
        last, self._last = self._last, None
        if last is None:
            return []
        self._read()
        seconds = self._timed()
        waited = min(self._wait_seconds / seconds, 1.0) if seconds > 0 else None
        call, at = last.call, last.place
        sums = {name: self._sums[name] for name in call.on_host if name in self._sums}
        for name in (*call.latest, ROUND_LOSS):
            if name in sums and not sums[name][1]:
                del sums[name]
        metrics = {name: total / rows if rows else math.nan for name, (total, rows) in sums.items()}
        metrics |= self._merged.values()
        record = Record("train", at.step, at.epoch, metrics, self.rows, seconds, waited)
        self.rows, self._sums, self._wait_seconds, self._seconds = 0, {}, 0.0, 0.0
        self._merged = MergedOfSteps()
        if self._started is not None:
            self._started = self._reached
        return [record]

    def save_state(self) -> dict[str, Any]:
        """Return, as JSON values, what the next record needs from the steps so far."""
        self._read()
        sums = {name: list(each) for name, each in self._sums.items()}
        state = {"rows": self.rows, "seconds": self._timed(), "sums": sums}
        merged = self._merged.save_state()
        return state | {"merged": merged} if merged else state

    def rewind(self, state: dict[str, Any], *, resumed: bool, compiled: bool) -> None:
        """Return to the point where `save_state` returned `state`, discarding later steps.

        Args:
            state: empty for none; without `sums`, metrics include only the steps that follow.
            resumed: whether there were earlier steps.
            compiled: whether the next step is already compiled.
        """
        self.rows, self._seconds = state.get("rows", 0), state.get("seconds", 0.0)
        self._sums = {name: list(each) for name, each in state.get("sums", {}).items()}
        self._merged = MergedOfSteps(state.get("merged"))
        self._unread: list[Finished] = []
        self._last, self._wait_seconds, self._resumed = None, 0.0, resumed
        self._started, self._reached, self._together = None, time.perf_counter(), (0, 0.0)
        if compiled:
            self._start()

    def _start(self) -> None:
        """Start the clock, as if the seconds that a resumed run brings had just passed."""
        self._reached, self._together = time.perf_counter(), (0, 0.0)
        self._started = self._reached - self._seconds

    def _timed(self) -> float:
        """Return the seconds from the last record to the last step."""
        return self._seconds if self._started is None else self._reached - self._started

    def _read(self) -> None:
        """Add the metrics of finished steps, of which reading many at once takes least time."""
        for steps in self._unread:
            counted = [
                0 if skipped else rows
                for rows, skipped in zip(steps.rows, steps.skipped, strict=True)
            ]
            for name, values in steps.metrics():
                if isinstance(values[0], Merged):
                    for metric, rows in zip(values, counted, strict=True):
                        if rows:
                            self._merged.add(name, metric)
                    continue
                sums, latest = self._sums.setdefault(name, [0.0, 0]), steps.call.latest.get(name)
                for value, rows in zip(values, counted, strict=True):
                    if not math.isfinite(value):
                        continue
                    if latest:
                        sums[:] = float(value), 1
                    elif rows:
                        sums[0] += rows * value
                        sums[1] += rows
        self._unread.clear()


class BadSteps:
    """Tracks the steps of a guarded `DataParallel`; returns a `Record` for each skipped update.

    At `most_in_a_row` the run ends; `optax.apply_if_finite` would instead apply the update.
    """

    def __init__(self, most_in_a_row: int, job: Job, judged: Sequence[str] = ()) -> None:
        self.in_a_row = 0
        """Consecutive skipped steps among those read so far; set it when a run resumes."""
        self._most, self._job = most_in_a_row, job
        self._judged = judged
        self._skipped: list[Record] = []  # of the consecutive skipped steps
        self._verdicts: list[int] = []  # of these

    def finished(self, steps: Finished) -> list[Record]:
        """Return the record of each skipped update."""
        skipped = steps.skipped
        if not any(skipped):
            self.rewind(0)
            return []
        found = []
        for step, is_skipped in zip(steps.steps(), skipped, strict=True):
            if is_skipped:
                found.append(self._record(step))
            else:
                self.rewind(0)
        return found

    def _record(self, step: Dispatched) -> Record:
        self.in_a_row += 1
        examples = step.examples()
        metrics = {LOSS: float(step.metrics[LOSS])} | ({SPIKE: 1.0} if step.spike else {})
        rows, at = len(examples) if step.rows is None else step.rows, step.place
        record = Record("skip", at.step, at.epoch, metrics, rows, 0.0, examples=examples)
        self._skipped.append(record)
        self._verdicts.append(step.not_finite)
        return record

    def check(self) -> None:
        """Raise `DivergedError` on too many consecutive bad steps; call once they are recorded."""
        if self.in_a_row < self._most or not self._skipped:
            return
        first, end = self._skipped[0], self._skipped[-1].step
        begin = end - self.in_a_row + 1
        on = "first on" if first.step == begin else f"step {first.step} on"
        when, those = f"in {self.in_a_row} steps in a row, {begin} to {end}", "all were"
        if begin == end:
            on, when, those = "on", f"at step {end}", "it was"
        # Before any process ends, which would break what the others still read.
        self._job.agree("the bad steps", {"first": begin, "last": end})
        self._job.barrier("too many bad steps")
        spikes = {SPIKE in record.metrics for record in self._skipped}
        what = "the loss was far above recent losses, or it or its gradient was not finite,"
        if spikes == {False}:
            what = "the loss or its gradient was not finite"
        elif spikes == {True}:
            what = "the loss was far above recent losses"
        fix = "lower the learning rate, clip the gradient, or look at these examples"
        named = {self._judged[n - 1] for n in self._verdicts if 0 < n <= len(self._judged)}
        if min(self._verdicts) > 0 and named:
            what = f"the loss was finite and {min(named)} was not"
            fix = (
                "where a mask or a weight of 0 hides a value, such as sqrt(0), its derivative "
                "still counts: replace its operand with jnp.where; or " + fix
            )
        raise DivergedError(f"{what} {when} ({on} {_examples_text(first)}); {those} skipped: {fix}")

    def rewind(self, in_a_row: int) -> None:
        """Discard the steps to be repeated; `in_a_row` is the count before them."""
        self.in_a_row = in_a_row
        self._skipped.clear()
        self._verdicts.clear()


def _examples_text(record: Record) -> str:
    """Return a text such as `examples 17, 203, 5, ... of epoch 3`."""
    examples = record.examples or ()
    more = ", ..." if len(examples) > _NAMED else ""
    plural = "s" if len(examples) != 1 else ""
    names = ", ".join(map(str, examples[:_NAMED])) or "none"
    return f"example{plural} {names}{more} of epoch {record.epoch}"


def recorded(values: dict[str, Any]) -> dict[str, float]:
    """Return `values`; `LossError` if one is no number, which a record cannot have."""
    for name, value in values.items():
        if not isinstance(value, int | float):
            shape = f"an array {list(value.shape)}" if hasattr(value, "shape") else repr(value)
            raise LossError(
                f"the metric {name!r} computes {shape}, and the records of a run have numbers: "
                "return a number or a dict of numbers, or evaluate it with dp.evaluate"
            )
    return values

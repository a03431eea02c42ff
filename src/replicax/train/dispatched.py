"""Dispatched steps: their position in the run, and their results once they finish."""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.data.merged import Merged
from replicax.core.data.per_row import ByRow
from replicax.core.data.share import FeedItem
from replicax.core.ground.in_flight import InFlight
from replicax.core.ground.leaves import whole_on_host
from replicax.core.ground.train_state import Metrics
from replicax.core.step.base import StepFigure
from replicax.core.step.loss_scale import value_of
from replicax.train.guarded import NOT_FINITE, SPIKE


@dataclasses.dataclass(frozen=True)
class RunPosition:
    """A point in a run."""

    step: int
    """Updates done."""
    epoch: int
    """Counted from 0."""
    batch: int
    """Batches of the epoch done."""

    def next_epoch(self) -> "RunPosition":
        return RunPosition(self.step, self.epoch + 1, 0)


@dataclasses.dataclass(frozen=True)
class Call:
    """The steps of one dispatched program, which finish together."""

    place: RunPosition
    """Position after the last step."""
    rows: tuple[int | None, ...]
    """Real rows of each step, if known."""
    mask: jax.Array
    index: jax.Array
    results: Mapping[str, Any]
    """Metrics with their verdicts; those of several steps are arrays of all, `[steps, ...]`."""
    is_one: bool
    """Whether it is one step by itself, whose arrays have no dim of steps."""

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Metrics of all steps, as the step, or `steps`, returned them, without verdicts."""
        known = {NOT_FINITE, SPIKE}
        return {name: value_of(each) for name, each in self.results.items() if name not in known}

    @cached_property
    def latest(self) -> dict[str, bool]:
        """Name of each metric that is no mean over rows -> whether a record has its last value."""
        figures = {name: each for name, each in self.results.items() if name in self.metrics}
        return {n: each.latest for n, each in figures.items() if isinstance(each, StepFigure)}

    @cached_property
    def on_host(self) -> dict[str, Any]:
        """Metrics of all steps but those by row, once they have finished; waits for them."""
        by_step = {n: each for n, each in self.metrics.items() if not isinstance(each, ByRow)}
        read: dict[str, Any] = jax.tree.map(np.asarray, by_step)
        return read

    @cached_property
    def verdicts(self) -> tuple[list[int], list[bool]]:
        """Whether each step was skipped: the number of `NOT_FINITE`, and as a spike; waits."""
        not_finite = np.asarray(self.results[NOT_FINITE]).reshape(-1).tolist()
        spikes = self.results.get(SPIKE)
        none = [False] * len(not_finite)
        return not_finite, none if spikes is None else np.asarray(spikes).reshape(-1).tolist()

    @cached_property
    def last(self) -> "Dispatched":
        """The last step; of a call of one step, that."""
        return Dispatched(self, len(self.rows) - 1)

    def steps(self, first: int = 0, end: int | None = None) -> list["Dispatched"]:
        """Return the steps with these numbers, in order."""
        last = len(self.rows) - 1
        numbers = range(first, last + 1 if end is None else end)
        return [self.last if number == last else Dispatched(self, number) for number in numbers]


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A guarded step dispatched to the devices; the step tracker returns it once it finishes."""

    call: Call
    number: int
    """Which step of its call it is, counted from 0."""
    attached: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Name -> object attached by a hook, to read when the step has finished."""

    @property
    def place(self) -> RunPosition:
        """Position after the step."""
        at, later = self.call.place, len(self.call.rows) - 1 - self.number
        return RunPosition(at.step - later, at.epoch, at.batch - later)

    @property
    def rows(self) -> int | None:
        """Real rows of its batch, if known."""
        return self.call.rows[self.number]

    @cached_property
    def metrics(self) -> Metrics:
        """Metrics without `not_finite` and `spike`; a step of several is waited for."""
        if self.call.is_one:
            by_row = self.by_row
            return {n: each for n, each in self.call.metrics.items() if n not in by_row}
        return {name: value[self.number] for name, value in self.call.on_host.items()}

    @property
    def by_row(self) -> dict[str, ByRow]:
        """Results with an entry for each row, of all steps of its call; records do not have them.

        Those of several steps are `[steps, rows, ...]`.
        """
        return {n: each for n, each in self.call.metrics.items() if isinstance(each, ByRow)}

    @property
    def not_finite(self) -> int:
        """Nonzero if its update was skipped because a value was not finite; see `guarded`."""
        return self.call.verdicts[0][self.number]

    @property
    def spike(self) -> bool:
        """Whether its update was skipped as a spike."""
        return self.call.verdicts[1][self.number]

    def examples(self) -> tuple[int, ...]:
        """Return the indices of the real rows of its batch."""
        index, mask = whole_on_host(self.call.index), whole_on_host(self.call.mask)
        if not self.call.is_one:
            index, mask = index[self.number], mask[self.number]
        return tuple(int(each) for each in index[mask > 0])


@dataclasses.dataclass(frozen=True)
class Finished:
    """Consecutive steps of a call, which have finished: from `first`, before `end`."""

    call: Call
    first: int
    end: int
    ready: int
    """Number of steps finished by now, from the first on."""

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def place(self) -> RunPosition:
        """Position after the last of them."""
        return Dispatched(self.call, self.end - 1).place

    def steps(self) -> list[Dispatched]:
        return self.call.steps(self.first, self.end)

    @property
    def rows(self) -> list[int]:
        """Real rows of each step, 0 if not known."""
        return [rows or 0 for rows in self.call.rows[self.first : self.end]]

    @property
    def skipped(self) -> list[bool]:
        """Whether the update of each step was skipped."""
        not_finite, spikes = (each[self.first : self.end] for each in self.call.verdicts)
        return [bool(one or other) for one, other in zip(not_finite, spikes, strict=True)]

    def metrics(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield the name of each metric, and its value in each step: a number or a `Merged`."""
        steps = range(self.first, self.end)
        for name, value in self.call.on_host.items():
            if isinstance(value, Merged):
                yield name, [value] if self.call.is_one else [value[n] for n in steps]
            else:
                yield name, value.reshape(-1)[self.first : self.end].tolist()


def dispatched(place: RunPosition, batch: FeedItem, results: Mapping[str, Any]) -> Call:
    """Return the call that led to `place`, and begin to copy its `results` to the host."""
    if next(iter(results[NOT_FINITE].devices())).platform != "cpu":  # on CPU it only costs time
        for value in jax.tree.leaves(dict(results)):
            value.copy_to_host_async()
    if isinstance(batch, Batch):
        return Call(place, (batch.rows,), batch.mask, batch.index, results, is_one=True)
    return Call(place, batch.rows, batch.stack.mask, batch.stack.index, results, is_one=False)


def finished(in_flight: InFlight, may_remain: int, every: int = 1) -> Iterator[Finished]:
    """Yield the steps of all calls but the newest `may_remain`, in order, as they finish.

    They are cut after each multiple of `every` steps of the run.
    """
    for call in in_flight.notes(may_remain):
        count, ready = len(call.rows), in_flight.finished_since
        begun, first = call.place.step - count, 0
        while first < count:
            end = min(count, first + every - (begun + first) % every)
            yield Finished(call, first, end, ready + count - first)
            first = end

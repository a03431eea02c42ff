"""Dispatched steps: their position in the run, and their results once they finish."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.data.per_row import PerRow
from replicax.core.data.share import Batches, FeedItem
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


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A guarded step dispatched to the devices; the step tracker returns it once it finishes."""

    place: RunPosition
    """Position after the step."""
    rows: int | None
    """Real rows of its batch, if known."""
    mask: jax.Array
    index: jax.Array
    metrics: Metrics
    """Metrics without `not_finite` and `spike`."""
    not_finite: jax.Array
    """Nonzero if its update was skipped because a value was not finite; see `guarded`."""
    spike: jax.Array | None
    """Whether its update was skipped as a spike; None without spike detection."""
    latest: dict[str, bool] = dataclasses.field(default_factory=dict)
    """Name of each metric that is no mean over rows -> whether a record has its last value."""
    by_row: dict[str, PerRow] = dataclasses.field(default_factory=dict)
    """Results with an entry for each row, of all steps of its call; records do not have them."""
    number: int | None = None
    """Which of several steps it is, counted from 0: mask and index are then those of all."""
    attached: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Name -> object attached by a hook, to read when the step has finished."""

    def examples(self) -> tuple[int, ...]:
        """Return the indices of the real rows of its batch."""
        index, mask = whole_on_host(self.index), whole_on_host(self.mask)
        if self.number is not None:
            index, mask = index[self.number], mask[self.number]
        return tuple(int(each) for each in index[mask > 0])

    @functools.cached_property
    def skipped(self) -> bool:
        return bool(python_number(self.not_finite)) or (
            self.spike is not None and python_number(self.spike)
        )


def python_number(value: jax.Array) -> Any:
    """Return a scalar as Python's; `float` and `bool` of it take 8 us more, of every step."""
    return np.asarray(value).item()


@dataclasses.dataclass(frozen=True)
class Call:
    """The steps of one dispatched program, which finish together."""

    last: Dispatched
    """The last of them; of a call of one step, that."""
    metrics: dict[str, Any]
    """Metrics of all steps, as the step, or `steps`, returned them, without verdicts."""
    batches: Batches | None
    """The batches of several steps."""
    results: Mapping[str, Any]
    """Metrics of all steps with their verdicts."""

    def steps(self) -> list[Dispatched]:
        """Return the steps in order; waits for them if there are several."""
        if self.batches is None:
            return [self.last]
        stack, at, rows = self.batches.stack, self.last.place, self.batches.rows
        before = len(rows) - 1
        results = {
            name: jax.tree.map(np.asarray, value)
            for name, value in self.results.items()
            if not isinstance(value, PerRow)
        }
        return [
            _dispatched(
                RunPosition(at.step - later, at.epoch, at.batch - later),
                rows[before - later],
                (stack.mask, stack.index),
                {name: _of_step(value, before - later) for name, value in results.items()},
                before - later,
            )
            for later in range(before, 0, -1)
        ] + [self.last]


def dispatched(place: RunPosition, batch: FeedItem, results: Mapping[str, Any]) -> Call:
    """Return the call that led to `place`, and begin to copy its `results` to the host."""
    known = {NOT_FINITE, SPIKE}
    metrics = {name: value_of(each) for name, each in results.items() if name not in known}
    if next(iter(results[NOT_FINITE].devices())).platform != "cpu":  # on CPU it only costs time
        for value in jax.tree.leaves(dict(results)):
            value.copy_to_host_async()
    if isinstance(batch, Batch):
        last = _dispatched(place, batch.rows, (batch.mask, batch.index), results, None)
        return Call(last, metrics, None, results)
    arrays, of_last = (batch.stack.mask, batch.stack.index), dict[str, Any]()
    for name, value in results.items():
        of_last[name] = value if isinstance(value, PerRow) else _of_step(value, -1)
    last = _dispatched(place, batch.rows[-1], arrays, of_last, len(batch) - 1)
    return Call(last, metrics, batch, results)


def finished(in_flight: InFlight, may_remain: int) -> Iterator[tuple[Dispatched, int]]:
    """Yield the steps of all calls but the newest `may_remain`, in order, as they finish.

    With each, how many have finished by now from it on.
    """
    for call in in_flight.notes(may_remain):
        steps = call.steps()
        ready = in_flight.finished_since + len(steps)
        yield from zip(steps, range(ready, ready - len(steps), -1), strict=True)


def _dispatched(
    place: RunPosition,
    rows: int | None,
    arrays: tuple[jax.Array, jax.Array],
    results: Mapping[str, Any],
    number: int | None,
) -> Dispatched:
    by_row = {name: value for name, value in results.items() if isinstance(value, PerRow)}
    known = {NOT_FINITE, SPIKE, *by_row}
    others = {name: value_of(each) for name, each in results.items() if name not in known}
    latest = {name: each.latest for name, each in results.items() if isinstance(each, StepFigure)}
    verdicts = results[NOT_FINITE], results.get(SPIKE)
    return Dispatched(place, rows, *arrays, others, *verdicts, latest, by_row, number)


def _of_step(value: Any, number: int) -> Any:
    if isinstance(value, StepFigure):
        return dataclasses.replace(value, value=value.value[number])
    return value[number]

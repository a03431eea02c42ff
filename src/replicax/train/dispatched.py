"""A step of a run: where it is in the run, and what is read of it once it has finished."""

import dataclasses
from typing import Any

import jax

from replicax.core.batch import Batch
from replicax.core.update import Metrics
from replicax.train.guarded import NOT_FINITE, SPIKE


@dataclasses.dataclass(frozen=True)
class Place:
    """A point in a run."""

    step: int
    """Updates done."""
    epoch: int
    """Counted from 0."""
    batch: int
    """Batches of the epoch that were done."""


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A guarded step that was given to the devices; the tracker of steps gives it back, late."""

    place: Place
    """After it."""
    rows: int | None
    """Real rows of its batch, where they are known."""
    mask: jax.Array
    index: jax.Array
    metrics: Metrics
    """Without the two verdicts."""
    not_finite: jax.Array
    """Whether its update was skipped because something was not finite."""
    spike: jax.Array | None
    """Whether it was skipped as a spike; None where spikes are not looked for."""
    attached: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Attachments of hooks, by a name of theirs, to be found once the step has finished."""

    @property
    def skipped(self) -> bool:
        """Whether its update was; waits until the step has finished."""
        return bool(self.not_finite) or (self.spike is not None and bool(self.spike))


def dispatched(place: Place, batch: Batch, metrics: Metrics) -> Dispatched:
    """Return the record of a step, and begin to copy its metrics and verdicts to the host.

    Args:
        place: after the step.
        batch: its batch.
        metrics: what it returned.
    """
    others = {name: value for name, value in metrics.items() if name not in (NOT_FINITE, SPIKE)}
    not_finite, spike = metrics[NOT_FINITE], metrics.get(SPIKE)
    if next(iter(not_finite.devices())).platform != "cpu":  # there it would only cost time
        for value in metrics.values():
            value.copy_to_host_async()
    return Dispatched(place, batch.rows, batch.mask, batch.index, others, not_finite, spike)

"""Steps of a run, done once more: what feeds them, and whose state is like what they give."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from replicax.core.batch import Batch
from replicax.core.update import TrainState
from replicax.train.dispatched import Place
from replicax.train.fingerprint import Difference, Fingerprint
from replicax.train.hook import Running


def batches_after(run: Running, place: Place) -> Iterator[Batch]:
    """The batches of `run` from `place` on, once more, without an end."""
    yield from run.dp.feed(run.source, epoch=place.epoch, first=place.batch)
    for epoch in itertools.count(place.epoch + 1):
        yield from run.dp.feed(run.source, epoch=epoch)


def votes_of(
    replay: TrainState,
    fingerprint: Fingerprint,
    differences: Sequence[Difference],
    state: TrainState,
) -> tuple[dict[int, int], bool]:
    """Elements in which each device is nearest to `replay`, and whether the best equals it.

    Only those count in which devices differ from each other.

    Args:
        replay: equal on all devices.
        fingerprint: of such states.
        differences: between devices, in `state`.
        state: the run's.
    """
    votes = {place: 0 for each in differences for place in sum(each.groups, ())}
    exact = True
    for each in differences:
        held, again = (fingerprint.gather(of, each.leaf) for of in (state, replay))
        places = [group[0] for group in each.groups]
        distance = np.stack([_distance(held[place], again[place]) for place in places])
        apart = distance[:, (distance != distance[:1]).any(0)]
        exact &= not apart.min(0, initial=np.inf).any()
        nearest = (apart == apart.min(0)).sum(1)
        for group, count in zip(each.groups, nearest, strict=True):
            votes |= {place: votes[place] + int(count) for place in group}
    return votes, exact


def _distance(held: np.ndarray, again: np.ndarray) -> Any:
    """How far each element is from what it should be: 0 for the same bits alone."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(held.astype(np.complex128) - again.astype(np.complex128))
    apart = np.where(np.isnan(apart), np.inf, np.maximum(apart, np.finfo(np.float64).tiny))
    differ = held[..., None].view(np.uint8) != again[..., None].view(np.uint8)
    return np.where(differ.any(-1), apart, 0.0).reshape(-1)

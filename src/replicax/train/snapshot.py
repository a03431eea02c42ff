"""A host copy of a train state."""

import dataclasses
from typing import Any

import jax
import numpy as np

from replicax.core.leaves import is_random_key, numbers
from replicax.core.update import TrainState


class Snapshot:
    """A copy of `state` in host memory: of each array the parts that this process holds, once.

    Waits until `state` is computed. In a job every process makes one.
    """

    def __init__(self, state: TrainState) -> None:
        leaves, tree = jax.tree.flatten(state)
        self._tree: Any = tree
        self._kinds = [_kind(leaf) for leaf in leaves]
        self._parts = [_parts(numbers(leaf)) for leaf in leaves]

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(part.nbytes for parts in self._parts for part in parts.values())

    def restore(self) -> TrainState:
        """A new state with the same bits, every copy of each array made from the one here."""
        state: TrainState = self._tree.unflatten(map(_placed, self._kinds, self._parts))
        return state


@dataclasses.dataclass(frozen=True)
class _Kind:
    """An array without its contents; those of a key are its data."""

    shape: tuple[int, ...]
    sharding: jax.sharding.Sharding
    key_impl: Any


def _kind(leaf: jax.Array) -> _Kind:
    impl = jax.random.key_impl(leaf) if is_random_key(leaf) else None
    return _Kind(numbers(leaf).shape, leaf.sharding, impl)


def _parts(array: jax.Array) -> dict[str, np.ndarray]:
    """Where in `array` -> what is there; the copies are the host's own."""
    parts: dict[str, np.ndarray] = {}
    for shard in array.addressable_shards:
        if str(shard.index) not in parts:
            parts[str(shard.index)] = np.array(shard.data, copy=True)
    return parts


def _placed(kind: _Kind, parts: dict[str, np.ndarray]) -> jax.Array:
    # Copied, as a device may take a host array for its own memory, and a step writes there.
    data = jax.make_array_from_callback(
        kind.shape, kind.sharding, lambda index: parts[str(index)].copy()
    )
    return data if kind.key_impl is None else jax.random.wrap_key_data(data, impl=kind.key_impl)

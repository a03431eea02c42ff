"""A host copy of a train state."""

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
        self._kinds = [_Kind(leaf) for leaf in leaves]
        self._parts = [_parts(numbers(leaf)) for leaf in leaves]

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(part.nbytes for parts in self._parts for part in parts.values())

    def restore(self) -> TrainState:
        """A new state with the same bits, every copy of each array made from the one here."""
        state: TrainState = self._tree.unflatten(map(_Kind.placed, self._kinds, self._parts))
        return state


class _Kind:
    """An array without its contents; those of a key are its data."""

    def __init__(self, leaf: jax.Array) -> None:
        self._shape, self._sharding = numbers(leaf).shape, leaf.sharding
        self._key_impl = jax.random.key_impl(leaf) if is_random_key(leaf) else None

    def placed(self, parts: dict[str, np.ndarray]) -> jax.Array:
        # Copied, as a device may take a host array for its own memory, and a step writes there.
        data = jax.make_array_from_callback(
            self._shape, self._sharding, lambda index: parts[str(index)].copy()
        )
        return (
            data if self._key_impl is None else jax.random.wrap_key_data(data, impl=self._key_impl)
        )


def _parts(array: jax.Array) -> dict[str, np.ndarray]:
    """Where in `array` -> what is there; the copies are the host's own."""
    once: dict[str, Any] = {str(shard.index): shard.data for shard in array.addressable_shards}
    return {index: np.array(data, copy=True) for index, data in once.items()}

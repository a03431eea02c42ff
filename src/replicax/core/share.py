"""Which rows of a global batch this process holds, and how they become a global array."""

import dataclasses
from functools import cached_property
from typing import Any

import jax
import numpy as np

PyTree = Any


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of this process in global batches of one size."""

    sharding: jax.sharding.Sharding
    """By rows, over the devices of all processes."""
    size: int
    """Rows of a global batch, its padding included."""

    @cached_property
    def held(self) -> np.ndarray:
        """Int `[held rows]`: which of them lie on this process's devices, ascending."""
        parts = self.sharding.addressable_devices_indices_map((self.size,)).values()
        return np.unique(np.concatenate([np.arange(self.size)[part] for part in parts if part]))

    def part(self, whole: PyTree) -> PyTree:
        """Of host arrays `[size, ...]` the rows that this process holds."""
        if self.sharding.is_fully_addressable:
            return whole
        return jax.tree.map(lambda leaf: leaf[self.held], whole)

    def place(self, leaf: np.ndarray) -> jax.Array:
        """The global array `[size, ...]` of which this process has `leaf`, `[held rows, ...]`."""

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[0].indices(self.size)
            first = int(np.searchsorted(self.held, start))
            rows: np.ndarray = leaf[first : first + stop - start]
            return rows

        shape = (self.size, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, self.sharding, part)

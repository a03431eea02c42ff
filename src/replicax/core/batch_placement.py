"""Pad the rows that users pass, and place them for a step."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.data.batch import Batch, described, host_rows, pad, row_count, with_padded_sets
from replicax.core.data.feed import Split
from replicax.core.data.host_arrays import opened
from replicax.core.data.share import Batches, Share, refuse_sets
from replicax.core.ground.leaves import PyTree
from replicax.core.placement.mesh import AnyMesh, by_rows
from replicax.errors import DataError


@dataclasses.dataclass(frozen=True)
class BatchPlacement:
    """Makes batches of rows `[rows, ...]`, all of them in every process."""

    mesh: AnyMesh
    split: Split
    rows_of_state: int | None
    """Rows of the state, including padding; None if it has none."""

    def described(self, batch: Any) -> Batch:
        """Return the shapes of the batch that a step uses for a `Batch` or pytree `[rows, ...]`."""
        if not isinstance(batch, Batch):
            batch, size = self._with_padded_sets(batch)
            batch = described(batch, size)
        shapes: Batch = jax.eval_shape(lambda arrays: arrays, batch)
        return shapes

    def placed(self, data: PyTree) -> Batch:
        """Return rows as a padded batch with the sharding that a step uses."""
        data, size = self._with_padded_sets(opened(data))
        rows = row_count(data)
        if rows < size or not _are_arrays(data):
            data = host_rows(data, copy=True)
        return Share(by_rows(self.mesh), size).place(pad(data, size, np.arange(rows)))

    def placed_all(self, batches: PyTree | list[Any]) -> Batches:
        """Return the batches of several steps: a list, or a pytree `[steps, rows, ...]`."""
        if not isinstance(batches, list):
            return self._placed_stack(opened(batches))
        if not batches:
            raise DataError("a call of 0 steps; pass at least one batch")
        if all(isinstance(batch, Batch) for batch in batches):
            return Share(by_rows(self.mesh), batches[0].size).place_all(batches)
        every = [host_rows(batch, copy=True) for batch in batches]
        size = self._size(max(map(row_count, every)))
        padded = [pad(data, size, np.arange(row_count(data))) for data in every]
        return Share(by_rows(self.mesh), size).place_all(padded)

    def _placed_stack(self, stack: PyTree) -> Batches:
        steps, rows = _steps_and_rows(stack)
        size = self._size(rows)
        if rows < size or not _are_arrays(stack):
            stack = host_rows(stack, copy=True)
        if rows < size:
            stack = jax.tree.map(lambda leaf: leaf[:, np.arange(size) % rows], stack)
        index = np.broadcast_to(np.arange(size) % rows, (steps, size))
        return Share(by_rows(self.mesh), size).place_rows(stack, index, np.full(steps, rows))

    def traced(self, data: PyTree) -> Batch:
        """Return rows that are traced as a padded batch."""
        data = opened(data)
        refuse_sets([Batch(data, None, None).apart()])
        rows = row_count(data)
        return pad(jax.tree.map(jnp.asarray, data), self._size(rows), np.arange(rows)).apart()

    def _size(self, rows: int) -> int:
        """Return the size of a batch of so many rows."""
        return max(self.split.padded(rows), self.rows_of_state or 0)

    def _with_padded_sets(self, data: PyTree) -> tuple[PyTree, int]:
        """Return rows with their sets padded, and the size of a batch of them."""
        rows = row_count(data)
        size = self._size(rows)
        return with_padded_sets(data, partial(self.split.padded_set, real=rows, size=size)), size


def _are_arrays(data: PyTree) -> bool:
    return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(data))


def _steps_and_rows(stack: PyTree) -> tuple[int, int]:
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(stack)]
    dims: Sequence[tuple[int, ...]] = sorted({shape[:2] for shape in shapes})
    if len(dims) != 1 or len(dims[0]) < 2 or not dims[0][0]:
        raise DataError(
            f"arrays that begin with the dims {', '.join(map(str, dims)) or 'of none'} in a call "
            "of several steps; all must begin with [steps, rows]: stack them, or pass a list of "
            "batches"
        )
    return dims[0][0], dims[0][1]

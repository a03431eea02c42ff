"""Pad the rows that users pass, and place them for a step."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.data.feed import Split
from replicax.core.data.rows import OpenedRows, opened
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
            rows, size = self._with_padded_sets(batch)
            batch = rows.described(size)
        shapes: Batch = jax.eval_shape(lambda arrays: arrays, batch)
        return shapes

    def placed(self, data: PyTree) -> Batch:
        """Return rows as a padded batch with the sharding that a step uses."""
        rows, size = self._with_padded_sets(data)
        if rows.count < size or not _are_arrays(rows.data):  # else they stay on their devices
            rows = rows.on_host(copy=True)
        return Share(by_rows(self.mesh), size).place(rows.padded(size))

    def placed_all(self, batches: PyTree | list[Any]) -> Batches:
        """Return the batches of several steps: a list, or a pytree `[steps, rows, ...]`."""
        if not isinstance(batches, list):
            return self._placed_stack(opened(batches))
        if not batches:
            raise DataError("a call of 0 steps; pass at least one batch")
        if all(isinstance(batch, Batch) for batch in batches):
            return Share(by_rows(self.mesh), batches[0].size).place_all(batches)
        every = [opened(batch).on_host(copy=True) for batch in batches]
        size = self._size(max(rows.count for rows in every))
        return Share(by_rows(self.mesh), size).place_all([rows.padded(size) for rows in every])

    def _placed_stack(self, stack: OpenedRows) -> Batches:
        steps, rows = _steps_and_rows(stack.data)
        size = self._size(rows)
        if rows < size or not _are_arrays(stack.data):
            stack = stack.on_host(copy=True)
        data, places = stack.data, np.arange(size) % rows
        if rows < size:
            data = jax.tree.map(lambda leaf: leaf[:, places], data)
        index = np.broadcast_to(places, (steps, size))
        return Share(by_rows(self.mesh), size).place_rows(data, index, np.full(steps, rows))

    def traced(self, data: PyTree) -> Batch:
        """Return rows that are traced as a padded batch."""
        rows = opened(data)
        refuse_sets([Batch(rows.data, None, None).apart()])
        size = self._size(rows.count)
        return OpenedRows(jax.tree.map(jnp.asarray, rows.data)).padded(size).apart()

    def _size(self, rows: int) -> int:
        return max(self.split.padded(rows), self.rows_of_state or 0)

    def _with_padded_sets(self, data: PyTree) -> tuple[OpenedRows, int]:
        """Return rows with their sets padded, and the size of a batch of them."""
        rows = opened(data)
        size = self._size(rows.count)
        padded = partial(self.split.padded_set, real=rows.count, size=size)
        return rows.with_padded_sets(padded), size


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

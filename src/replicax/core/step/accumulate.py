"""Gradient accumulation: sum over a replica's rows, one micro-batch at a time."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import CallContext
from replicax.core.placement.mesh import Axis
from replicax.core.step.base import StepSums, SumsFunction


@dataclasses.dataclass(frozen=True)
class Sequential:
    """Compute micro-batches in sequence, passing the extras of each to the next.

    The micro-batch's number is folded into the key, and the replica's index if each replica has
    its own rows.
    """

    parts: int = 1
    within: int = dataclasses.field(default=1, kw_only=True)
    """Micro-batches that the objective makes of each, as a pipelined one does."""
    gather: Callable[[jax.Array], jax.Array] | None = dataclasses.field(default=None, kw_only=True)
    """Gathers the rows of all parts of a batch, if no axis does."""

    def micro_batches(self, _replicas: int) -> int:
        return self.parts * self.within

    def replica_key(self, key: jax.Array, axis: Axis) -> jax.Array:
        return jax.random.fold_in(key, lax.axis_index(axis))

    def __call__(
        self,
        function: SumsFunction,
        state: TrainState,
        batch: Batch,
        key: jax.Array | None,
        axis: Axis | None,
    ) -> tuple[StepSums, PyTree]:
        if key is not None and axis is not None:
            key = self.replica_key(key, axis)
        some, scale = self.parts > 1, scale_of(state)

        def one(extras: PyTree, number: Any, rows: Batch) -> tuple[StepSums, PyTree]:
            context = CallContext(
                folded(key, number),
                axis,
                whole=axis is None,
                part=some,
                step=state.step,
                scale=scale,
                gather=self.gather,
            )
            return function(state.params, extras, rows, context)

        if not some:
            return one(state.extras, 0, batch)
        parts = jax.tree.map(partial(split_rows, parts=self.parts), batch)
        return add_in_turn(one, state.extras, parts, self.parts)


def add_in_turn(
    part: Callable[[PyTree, jax.Array, PyTree], tuple[StepSums, PyTree]],
    extras: PyTree,
    parts: PyTree,
    count: int,
) -> tuple[StepSums, PyTree]:
    """Return the sum of `part(extras, number, rows)` over `count` parts, and the last extras.

    `parts` holds the rows of all parts, `[count, ...]`; the extras of each are passed to the next.
    """

    def add(carry: tuple[PyTree, PyTree], numbered: tuple[jax.Array, PyTree]) -> Any:
        total, extras = carry
        sums, extras = part(extras, *numbered)
        added = jax.tree.map(jnp.add, total, dataclasses.replace(sums, rows={}))
        return (added, extras), sums.rows

    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes, _ = jax.eval_shape(part, extras, jnp.int32(0), first)
    none = zeros_like(dataclasses.replace(shapes, rows={}))
    (total, extras), rows = lax.scan(add, (none, extras), (jnp.arange(count), parts))
    return dataclasses.replace(total, rows=jax.tree.map(joined_rows, rows)), extras


def zeros_like(shapes: PyTree) -> PyTree:
    """Return zeros with these shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def scale_of(state: Any) -> jax.Array | None:
    """Return the loss scale of `state`, or None if it has none."""
    return state.scale.value if state.scale else None


def folded(key: jax.Array | None, number: Any) -> jax.Array | None:
    """Return `key` with `number` folded in; None in evaluation."""
    return None if key is None else jax.random.fold_in(key, number)


def split_rows(array: jax.Array, parts: int) -> jax.Array:
    """Reshape `[rows, ...]` to `[parts, rows / parts, ...]`; part k gets rows k, k + parts, ...

    Adjacent rows go to different parts, so a dim sharded over devices stays sharded without moving
    rows, and a micro-batch holds the same rows for any number of replicas.
    """
    rows = array.reshape(array.shape[0] // parts, parts, *array.shape[1:])
    return jnp.moveaxis(rows, 1, 0)


def joined_rows(parts: jax.Array) -> jax.Array:
    """Reshape `[parts, rows, ...]` to `[parts * rows, ...]`, undoing `split_rows`."""
    return jnp.moveaxis(parts, 0, 1).reshape(-1, *parts.shape[2:])

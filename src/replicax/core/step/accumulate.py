"""Gradient accumulation: sum over a replica's rows, one micro-batch at a time."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.data.batch import Batch
from replicax.core.data.merged import joined_parts
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import CallContext
from replicax.core.placement.mesh import Axis, numbers_on
from replicax.core.step.base import StepSums, SumsFunction


@dataclasses.dataclass(frozen=True)
class Sequential:
    """Compute micro-batches in sequence, passing extras that depend on rows from one to the next.

    The micro-batch's number is folded into the key, and the replica's index if each replica has
    its own rows.
    """

    parts: int = 1
    within: int = dataclasses.field(default=1, kw_only=True)
    """Micro-batches that the objective makes of each, as a pipelined one does."""
    gather: Callable[[list[jax.Array]], list[jax.Array]] | None = dataclasses.field(
        default=None, kw_only=True
    )
    """Gathers the rows of all parts of a batch, as in `CallContext`, if no axis does."""
    row_numbers: Callable[[int], jax.Array] | None = dataclasses.field(default=None, kw_only=True)
    """Returns the numbers of their rows in it, if no axis does."""

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
            part = number, self.parts
            context = CallContext(
                folded(key, number),
                axis,
                whole=axis is None,
                part=some,
                step=state.step,
                scale=scale,
                gather=self.gather,
                row_numbers=self.row_numbers or partial(numbers_on, axis, part=part),
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
    *,
    dim: int = 0,
) -> tuple[StepSums, PyTree]:
    """Return the sum of `part(extras, number, rows)` over `count` parts, and the last extras.

    `parts` holds the rows of all parts, `[count, ...]`, along `dim` of each; the extras of each are
    passed to the next. Those that do not depend on rows are updated once in a step, as on the whole
    batch: each part starts from those before the step, and the first part's remain.
    """
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    structure = jax.tree.structure(extras)
    shapes, once = _shapes_and_once(part, extras, first, dim)

    def chosen(
        where: Callable[[jax.Array, jax.Array], jax.Array], ours: PyTree, others: PyTree
    ) -> PyTree:
        """Return `others`, but `where(ours, others)` of extras that are updated once."""
        each = zip(once, jax.tree.leaves(ours), jax.tree.leaves(others), strict=True)
        return jax.tree.unflatten(
            structure, [where(a, b) if is_once else b for is_once, a, b in each]
        )

    def add(carry: tuple[PyTree, PyTree], numbered: tuple[jax.Array, PyTree]) -> Any:
        total, handed = carry
        number, rows = numbered
        sums, after = part(chosen(lambda own, _: own, extras, handed), number, rows)
        after = chosen(lambda own, new: jnp.where(number > 0, own, new), handed, after)
        added = jax.tree.map(jnp.add, total, dataclasses.replace(sums, rows={}))
        return (added, after), sums.rows

    none = zeros_like(dataclasses.replace(shapes, rows={}))
    (total, extras), rows = lax.scan(add, (none, extras), (jnp.arange(count), parts))
    return dataclasses.replace(total, rows=joined_parts(rows, joined_rows)), extras


def _shapes_and_once(
    part: Callable[[PyTree, jax.Array, PyTree], tuple[StepSums, PyTree]],
    extras: PyTree,
    rows: PyTree,
    dim: int,
) -> tuple[StepSums, list[bool]]:
    """Return the shapes of a part's sums, and which extras do not depend on rows."""
    from replicax.core.jaxprs.row_free import free_of_rows

    trace = partial(jax.make_jaxpr(part, return_shape=True), extras, jnp.int32(0))
    jaxpr, (shapes, _) = trace(rows)

    def twice(leaf: jax.Array) -> jax.ShapeDtypeStruct:
        sizes = [2 * size if n == dim else size for n, size in enumerate(leaf.shape)]
        return jax.ShapeDtypeStruct(tuple(sizes), leaf.dtype)

    counts = len(jax.tree.leaves(extras)), len(jax.tree.leaves(rows))
    return shapes, free_of_rows(jaxpr, *counts, lambda: trace(jax.tree.map(twice, rows))[0])


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

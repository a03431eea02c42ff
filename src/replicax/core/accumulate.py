"""The rows of a replica -> its sums, micro-batch by micro-batch."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.batch import Batch
from replicax.core.mesh import Axis
from replicax.core.models.definition import View

PyTree = Any
Part = Callable[..., tuple[PyTree, PyTree]]
"""`part(params, extras, batch, view) -> (sums, extras)`, as `Objective.step_sums`."""
Apply = Callable[..., tuple[PyTree, PyTree]]
"""`apply(state, total, extras, carried) -> (state, metrics)`; see `replicax.core.update`."""


class Accumulator(Protocol):
    """Adds up the micro-batches of a replica."""

    def micro_batches(self, replicas: int, /) -> int:
        """Return how many each of `replicas` computes, one after the other."""

    def __call__(
        self, part: Part, state: Any, batch: Batch, key: jax.Array | None, axis: Axis | None, /
    ) -> tuple[PyTree, PyTree]:
        """Return the sums of `part` over this replica's rows, and the extras after the step.

        `key` is that of the step, None in evaluation. `batch` is the whole one without an `axis`.
        """

    def replica_key(self, key: jax.Array, axis: Axis, /) -> jax.Array:
        """Return the key that a replica draws from, from that of the step."""


@dataclasses.dataclass(frozen=True)
class Sequential:
    """One micro-batch after the other, each of which begins with the extras of the last.

    Keys are folded with the replica's index, where each has its own rows, and with the
    micro-batch's number.
    """

    parts: int = 1
    within: int = dataclasses.field(default=1, kw_only=True)
    """How many the objective itself makes of each, as one in stages does."""

    def micro_batches(self, _replicas: int) -> int:
        return self.parts * self.within

    def replica_key(self, key: jax.Array, axis: Axis) -> jax.Array:
        return jax.random.fold_in(key, lax.axis_index(axis))

    def __call__(
        self, part: Part, state: Any, batch: Batch, key: jax.Array | None, axis: Axis | None
    ) -> tuple[PyTree, PyTree]:
        if key is not None and axis is not None:
            key = self.replica_key(key, axis)
        some, scale = self.parts > 1, scale_of(state)

        def one(extras: PyTree, number: Any, rows: Batch) -> tuple[PyTree, PyTree]:
            view = View(folded(key, number), axis, part=some, step=state.step, scale=scale)
            return part(state.params, extras, rows, view)

        if not some:
            return one(state.extras, 0, batch)
        parts = jax.tree.map(partial(cut, parts=self.parts), batch)
        return add_in_turn(one, state.extras, parts, self.parts)


def add_in_turn(
    part: Callable[[PyTree, jax.Array, PyTree], tuple[PyTree, PyTree]],
    extras: PyTree,
    parts: PyTree,
    count: int,
) -> tuple[PyTree, PyTree]:
    """Return the sum of `part(extras, number, rows)` over `count` parts, and the last extras.

    `parts` are the rows of all, `[count, ...]`; each part begins with the extras of the last.
    """

    def add(carry: tuple[PyTree, PyTree], numbered: tuple[jax.Array, PyTree]) -> Any:
        total, extras = carry
        sums, extras = part(extras, *numbered)
        return (jax.tree.map(jnp.add, total, sums), extras), None

    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes, _ = jax.eval_shape(part, extras, jnp.int32(0), first)
    carry, _ = lax.scan(add, (zeros_like(shapes), extras), (jnp.arange(count), parts))
    return carry


def zeros_like(shapes: PyTree) -> PyTree:
    """Return zeros of these shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def scale_of(state: Any) -> jax.Array | None:
    """Return what the loss is multiplied by, of a state that has a scale."""
    return state.scale.value if state.scale else None


def folded(key: jax.Array | None, number: Any) -> jax.Array | None:
    """Return `key` with `number` folded in; None in evaluation."""
    return None if key is None else jax.random.fold_in(key, number)


def cut(array: jax.Array, parts: int) -> jax.Array:
    """`[rows, ...]` -> `[parts, rows / parts, ...]`, part k holding the rows k, k + parts, ...

    Neighbours go to different parts, so that a dim split over devices stays split without moving
    rows, and a micro-batch holds the same rows whatever the number of replicas.
    """
    rows = array.reshape(array.shape[0] // parts, parts, *array.shape[1:])
    return jnp.moveaxis(rows, 1, 0)

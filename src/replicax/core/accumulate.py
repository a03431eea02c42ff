"""The sums over some rows -> those over the global batch: in what order, and where."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.batch import Batch
from replicax.core.reduction import reduce

PyTree = Any
Function = Callable[[PyTree], PyTree]
Part = Callable[..., tuple[PyTree, PyTree]]
"""`part(params, extras, batch, key, axis, alone) -> (sums, extras)`, as `Objective.sums` is."""


class Summation(Protocol):
    """From the sums over some rows to those over the global batch."""

    def micro_batches(self, replicas: int, /) -> int:
        """Parts that each of `replicas` computes one after the other."""

    def __call__(
        self,
        part: Part,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        key: jax.Array | None,
        axis: str | None,
    ) -> tuple[PyTree, PyTree]:
        """The sums over the global batch, and the extras after it.

        Args:
            part: the sums over some rows.
            params: trainable arrays.
            extras: the model's other arrays, before the step.
            batch: this replica's rows.
            key: of the step; None in evaluation.
            axis: the name of the replica axis, or None where the batch is the whole one.
        """

    def finish(self, function: Function, carry: PyTree, once: jax.Array, /) -> PyTree:
        """`function(carry)`, which computes on the sums.

        Args:
            function: returns what it is given, every array of it changed.
            carry: what it is given.
            once: int32 scalar: 1, which the compiler must not know.
        """


@dataclasses.dataclass(frozen=True)
class Running:
    """One micro-batch after the other, and one reduction over the replicas.

    Extras pass from each micro-batch to the next. Keys are folded with the replica's index, where
    each has its own rows, and with the micro-batch's number.
    """

    parts: int = 1

    def micro_batches(self, _replicas: int) -> int:
        """Micro-batches of each replica."""
        return self.parts

    def finish(self, function: Function, carry: PyTree, _once: jax.Array) -> PyTree:
        """See `Summation`."""
        return function(carry)

    def __call__(
        self,
        part: Part,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        key: jax.Array | None,
        axis: str | None,
    ) -> tuple[PyTree, PyTree]:
        """See `Summation`."""
        key = key if axis is None else folded(key, lax.axis_index(axis))
        with jax.named_scope("gradient"):
            local, extras = self._local(part, params, extras, batch, key, axis)
        with jax.named_scope("reduction"):
            return reduce(local, axis), extras

    def _local(
        self,
        part: Part,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        key: jax.Array | None,
        axis: str | None,
    ) -> tuple[PyTree, PyTree]:
        if self.parts == 1:
            return part(params, extras, batch, folded(key, 0), axis, False)

        def one(extras: PyTree, number: jax.Array, rows: Batch) -> tuple[PyTree, PyTree]:
            return part(params, extras, rows, folded(key, number), axis, False)

        parts = jax.tree.map(partial(_cut, parts=self.parts), batch)
        return add_in_turn(one, extras, parts, self.parts)


def add_in_turn(
    part: Callable[[PyTree, jax.Array, PyTree], tuple[PyTree, PyTree]],
    extras: PyTree,
    parts: PyTree,
    count: int,
) -> tuple[PyTree, PyTree]:
    """The sum of `part(extras, number, rows)` over `count` parts, and the extras after the last.

    Args:
        part: returns sums, and the extras that the next part begins with.
        extras: those of the first part.
        parts: rows of all parts, `[count, ...]`.
        count: how many there are.
    """

    def add(carry: tuple[PyTree, PyTree], numbered: tuple[jax.Array, PyTree]) -> Any:
        total, extras = carry
        sums, extras = part(extras, *numbered)
        return (jax.tree.map(jnp.add, total, sums), extras), None

    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes, _ = jax.eval_shape(part, extras, jnp.int32(0), first)
    carry, _ = lax.scan(add, (zeros_like(shapes), extras), (jnp.arange(count), parts))
    total, extras = carry
    return total, extras


def zeros_like(shapes: PyTree) -> PyTree:
    """Zeros of these shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def folded(key: jax.Array | None, number: Any) -> jax.Array | None:
    """`key` with `number` folded in; None in evaluation."""
    return None if key is None else jax.random.fold_in(key, number)


def _cut(array: jax.Array, parts: int) -> jax.Array:
    """`[rows, ...]` -> `[parts, rows / parts, ...]`, part k holding the rows k, k + parts, ...

    Neighbours go to different parts, so that a dim split over devices stays split without moving
    rows, and a micro-batch holds the same rows whatever the number of replicas.
    """
    rows = array.reshape(array.shape[0] // parts, parts, *array.shape[1:])
    return jnp.moveaxis(rows, 1, 0)

"""One replica's summed gradient, over its micro-batches."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.data.batch import Batch
from replicax.parallel.loss import LOSS, Sum, sums
from replicax.parallel.model import Definition, PyTree
from replicax.parallel.precision import Precision, to_sum

LossFunction = Callable[[Any, PyTree, jax.Array | None], Any]
"""`loss(model, batch, key)`; see `replicax.parallel.loss.sums` for what it may return."""


@partial(jax.tree_util.register_dataclass, data_fields=["gradient", "means"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Sums:
    """What one reduction carries: everything of a step that is summed over rows."""

    gradient: PyTree
    """Gradient of the loss's total, by params."""
    means: dict[str, Sum]
    """The loss and the metrics."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The user's loss on the user's model, in the dtype of the policy."""

    definition: Definition
    loss: LossFunction
    precision: Precision

    def means(
        self, params: PyTree, extras: PyTree, batch: Batch, key: jax.Array | None, axis: str | None
    ) -> tuple[dict[str, Sum], PyTree]:
        """The sums of loss and metrics over the rows of `batch`, and the extras after it."""
        data = self.precision.to_compute(batch.data)
        returned, extras = self.definition.apply(
            lambda model: self.loss(model, data, key),
            self.precision.to_compute(params),
            extras,
            key=key,
            axis=axis,
        )
        return sums(returned, batch.mask), extras

    def sums(
        self, params: PyTree, extras: PyTree, batch: Batch, key: jax.Array, axis: str | None
    ) -> tuple[Sums, PyTree]:
        """As `means`, with the gradient."""

        def total(params: PyTree) -> tuple[jax.Array, tuple[dict[str, Sum], PyTree]]:
            means, after = self.means(params, extras, batch, key, axis)
            return means[LOSS].total, (means, after)

        gradient, (means, after) = jax.grad(total, has_aux=True)(params)
        return Sums(jax.tree.map(to_sum, gradient), means), after


def replica_sums(
    objective: Objective,
    params: PyTree,
    extras: PyTree,
    batch: Batch,
    key: jax.Array,
    *,
    micro_batches: int,
    axis: str | None,
) -> tuple[Sums, PyTree]:
    """Sums over this replica's rows, one micro-batch after the other.

    Extras pass from each micro-batch to the next; keys are folded with its number.
    """
    if micro_batches == 1:
        return objective.sums(params, extras, batch, jax.random.fold_in(key, 0), axis)

    def add(carry: tuple[Sums, PyTree], numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        total, extras = carry
        number, micro_batch = numbered
        micro_key = jax.random.fold_in(key, number)
        part, extras = objective.sums(params, extras, micro_batch, micro_key, axis)
        return (jax.tree.map(jnp.add, total, part), extras), None

    parts = jax.tree.map(partial(_cut, parts=micro_batches), batch)
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    shapes, _ = jax.eval_shape(partial(objective.sums, axis=axis), params, extras, first, key)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    carry, _ = lax.scan(add, (zeros, extras), (jnp.arange(micro_batches), parts))
    return carry


def _cut(array: jax.Array, parts: int) -> jax.Array:
    """`[rows, ...]` -> `[parts, rows / parts, ...]`, part k holding the rows k, k + parts, ...

    Neighbours go to different parts, so that a dim split over devices stays split without moving
    rows, and a micro-batch holds the same rows whatever the number of replicas.
    """
    rows = array.reshape(array.shape[0] // parts, parts, *array.shape[1:])
    return jnp.moveaxis(rows, 1, 0)

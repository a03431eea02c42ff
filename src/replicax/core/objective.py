"""The loss on the model: its sums over some rows, and their gradient."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.batch import Batch
from replicax.core.loss import LOSS, Sum, sums
from replicax.core.models.split import Definition, PyTree
from replicax.core.precision import Precision, to_sum

LossFunction = Callable[[Any, PyTree, jax.Array | None], Any]
"""`loss(model, batch, key)`; see `replicax.core.loss.sums` for what it may return."""


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
    split: PyTree | None = None
    """Shardings of the parameters, where they are split over the replicas. The loss computes with
    whole ones: a compiler might else split what is computed as the parameters are, and send that.
    """

    def gathering(self, split: PyTree) -> "Objective":
        """The same for parameters that are split as these shardings say."""
        return dataclasses.replace(self, split=split)

    def means(
        self,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        key: jax.Array | None,
        axis: str | None,
        alone: bool = False,
    ) -> tuple[dict[str, Sum], PyTree]:
        """The sums of loss and metrics over the rows of `batch`, and the extras after it.

        Args:
            params: trainable arrays.
            extras: the model's other arrays.
            batch: some rows.
            key: source of random numbers; None in evaluation.
            axis: see `Definition.apply`.
            alone: see `Definition.apply`.
        """
        data = self.precision.to_compute(batch.data)
        returned, extras = self.definition.apply(
            lambda model: self.loss(model, data, key),
            self._gather(self.precision.to_compute(params)),
            extras,
            key=key,
            axis=axis,
            alone=alone,
        )
        return sums(returned, batch.mask), extras

    def _gather(self, params: PyTree) -> PyTree:
        return params if self.split is None else jax.tree.map(_gathered, params, self.split)

    def sums(
        self,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        key: jax.Array | None,
        axis: str | None,
        alone: bool = False,
    ) -> tuple[Sums, PyTree]:
        """As `means`, with the gradient."""

        def total(params: PyTree) -> tuple[jax.Array, tuple[dict[str, Sum], PyTree]]:
            means, after = self.means(params, extras, batch, key, axis, alone)
            return means[LOSS].total, (means, after)

        gradient, (means, after) = jax.grad(total, has_aux=True)(params)
        return Sums(jax.tree.map(to_sum, gradient), means), after


def _gathered(leaf: jax.Array, split: NamedSharding) -> jax.Array:
    """`leaf` on every device, its gradient summed to where the leaf lay."""
    whole = NamedSharding(split.mesh, PartitionSpec())

    @jax.custom_vjp
    def gather(leaf: jax.Array) -> jax.Array:
        whole_leaf: jax.Array = lax.with_sharding_constraint(leaf, whole)
        return whole_leaf

    def forward(leaf: jax.Array) -> tuple[jax.Array, None]:
        return gather(leaf), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        return (lax.with_sharding_constraint(gradient, split),)

    gather.defvjp(forward, backward)
    return gather(leaf)

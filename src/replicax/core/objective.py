"""The loss on the model: its sums over some rows, and their gradient."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.batch import Batch
from replicax.core.inside import inside
from replicax.core.loss import LOSS, WeightedSum, call, sums
from replicax.core.models.definition import Definition, PyTree, View
from replicax.core.precision import Precision, to_sum

LossFunction = Callable[[Any, PyTree, jax.Array | None], Any]
"""`loss(model, batch, key)`; see `replicax.core.loss.sums` for what it may return."""


@partial(jax.tree_util.register_dataclass, data_fields=["gradient", "weighted"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class StepSums:
    """Everything of a step that is summed over rows, and that one reduction carries."""

    gradient: PyTree
    """Gradient of the loss's total, by params."""
    weighted: dict[str, WeightedSum]
    """The loss and the metrics, before the division."""

    @property
    def weight(self) -> jax.Array:
        """Weight of the loss, the divisor of the gradient."""
        return self.weighted[LOSS].weight

    def means(self) -> dict[str, jax.Array]:
        """Return the weighted means of loss and metrics; NaN where nothing had any weight."""
        return {name: value.mean() for name, value in self.weighted.items()}


@dataclasses.dataclass(frozen=True)
class Objective:
    """The user's loss on the user's model, in the dtype of the policy."""

    definition: Definition
    loss: LossFunction
    precision: Precision
    split: PyTree | None = None
    """Shardings of the parameters, where they are split over the replicas. The loss computes with
    whole ones: a compiler might else split what is computed as they are, and send that."""

    def loss_sums(
        self, params: PyTree, extras: PyTree, batch: Batch, view: View
    ) -> tuple[dict[str, WeightedSum], PyTree]:
        """Return the sums of loss and metrics over the rows of `batch`, and the extras after it."""
        returned, extras = self.returned(params, extras, batch, view)
        return sums(returned, batch.mask), extras

    def returned(
        self, params: PyTree, extras: PyTree, batch: Batch, view: View
    ) -> tuple[Any, PyTree]:
        """Return what the loss returns for the rows of `batch`, and the extras after it."""
        data, params = self.precision.to_compute((batch.data, params))
        if self.split is not None:
            params = jax.tree.map(_gathered, params, self.split)
        with inside(batch.mask, view):
            return self.definition.apply(
                lambda model: call(self.loss, model, data, view.key), params, extras, view
            )

    def step_sums(
        self, params: PyTree, extras: PyTree, batch: Batch, view: View
    ) -> tuple[StepSums, PyTree]:
        """As `loss_sums`, with the gradient."""

        def total(params: PyTree) -> tuple[jax.Array, tuple[dict[str, WeightedSum], PyTree]]:
            weighted, after = self.loss_sums(params, extras, batch, view)
            return weighted[LOSS].total, (weighted, after)

        gradient, (weighted, after) = jax.grad(total, has_aux=True)(params)
        return StepSums(jax.tree.map(to_sum, gradient), weighted), after


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(leaf: jax.Array, split: NamedSharding) -> jax.Array:
    """`leaf` on every device, its gradient summed to where the leaf lay."""
    whole = NamedSharding(split.mesh, PartitionSpec())
    gathered: jax.Array = lax.with_sharding_constraint(leaf, whole)
    return gathered


_gathered.defvjp(
    lambda leaf, split: (_gathered(leaf, split), None),
    lambda split, _, gradient: (lax.with_sharding_constraint(gradient, split),),
)

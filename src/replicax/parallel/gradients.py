"""The loss on the model: its sums over some rows, and their gradient."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

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
            self.precision.to_compute(params),
            extras,
            key=key,
            axis=axis,
            alone=alone,
        )
        return sums(returned, batch.mask), extras

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

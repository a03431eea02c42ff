"""The loss of a model: its sums over rows, and their gradient."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from replicax.core.data.batch import Batch, unshared
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import Precision, to_sum
from replicax.core.models.definition import CallContext, Definition
from replicax.core.step.base import StepSums
from replicax.core.step.loss import LOSS, WeightedSum, call, merged_of, rows_of, sums
from replicax.core.step.loss_context import inside

LossFunction = Callable[[Any, PyTree, jax.Array | None], Any]
"""`loss(model, batch, key)`; see docs/training.md for what it may return."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """The user's loss and model, computed in the dtype of the precision policy."""

    definition: Definition
    loss: LossFunction
    precision: Precision
    read: tuple[bool, ...] | None = None
    """Which parameters have a gradient that is used, computed and reduced; None for all."""
    gathering: Callable[..., tuple[Any, Any]] | None = None
    """How the loss gets whole parameters if the layout splits them: a `Gathering`."""
    every_row: bool = False
    """Whether all values that have rows are returned by row, not only those marked so."""
    per_replica: ClassVar[bool] = False
    """Whether it splits a batch over replicas itself."""

    def loss_sums(
        self, params: PyTree, extras: PyTree, batch: Batch, context: CallContext
    ) -> tuple[dict[str, WeightedSum], PyTree]:
        """Return the sums of loss and metrics over the rows of `batch`, and the extras after it."""
        found, after = self.score_sums(params, extras, batch, context)
        return found.weighted, after

    def score_sums(
        self, params: PyTree, extras: PyTree, batch: Batch, context: CallContext
    ) -> tuple[StepSums, PyTree]:
        """Return `loss_sums`, with metrics that are no means."""

        def found(returned: Any) -> StepSums:
            return StepSums((), sums(returned, batch.mask), merged_of(returned, batch.mask))

        return self._called(found, params, extras, batch, context)

    def returned(
        self, params: PyTree, extras: PyTree, batch: Batch, context: CallContext
    ) -> tuple[Any, PyTree]:
        """Return the result of the loss for the rows of `batch`, and the extras after it."""
        return self._called(lambda returned: returned, params, extras, batch, context)

    def _called(
        self,
        then: Callable[[Any], Any],
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        context: CallContext,
    ) -> tuple[Any, PyTree]:
        """Return `then` of the loss's result, and the extras after it."""

        def of_whole(params: PyTree) -> tuple[Any, PyTree]:
            data = self.precision.to_compute(unshared(batch.whole().data))
            with inside(batch.mask, context):
                returned, after = self.definition.apply(
                    lambda model: call(self.loss, model, data, context.key, whole=context.whole),
                    *(params, extras, context),
                )
            return then(returned), after

        if self.gathering is None:
            return of_whole(self.precision.to_compute(params))
        return self.gathering(of_whole, params, self.precision)

    def step_sums(
        self, params: PyTree, extras: PyTree, batch: Batch, context: CallContext
    ) -> tuple[StepSums, PyTree]:
        """Return `loss_sums` with the gradient, which is None where it is unused, and rows."""

        def found(returned: Any) -> tuple[dict[str, WeightedSum], dict[str, PyTree]]:
            rows = rows_of(returned, batch.size, every=self.every_row)
            weighted = sums(returned, batch.mask, batch.counts)
            return weighted, rows | merged_of(returned, batch.mask)

        def total(read: PyTree) -> tuple[jax.Array, Any]:
            whole = restored(read, params, self.read)
            (weighted, rows), after = self._called(found, whole, extras, batch, context)
            return differentiated(weighted, context), (weighted, rows, after)

        gradient, (weighted, rows, after) = jax.grad(total, has_aux=True)(
            only_read(params, self.read)
        )
        return StepSums(jax.tree.map(to_sum, gradient), summed(weighted), rows), after


def differentiated(weighted: dict[str, WeightedSum], context: CallContext) -> jax.Array:
    """Return the scalar that a step differentiates."""
    value = weighted[LOSS].seeded
    assert value is not None
    return value if context.scale is None else value * context.scale


def summed(weighted: dict[str, WeightedSum]) -> dict[str, WeightedSum]:
    """Return what is summed over all rows; what was differentiated is not."""
    return {**weighted, LOSS: dataclasses.replace(weighted[LOSS], seeded=None)}


def only_read(tree: PyTree, read: tuple[bool, ...] | None) -> PyTree:
    """Return `tree`, shaped like the parameters, with None for leaves that are not read."""
    if read is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    kept = [leaf if each else None for leaf, each in zip(leaves, read, strict=True)]
    return jax.tree.unflatten(structure, kept)


def restored(leaves_read: PyTree, params: PyTree, read: tuple[bool, ...] | None) -> PyTree:
    """Return `params` with the leaves that are read replaced by `leaves_read`; see `only_read`."""
    if read is None:
        return leaves_read
    leaves, structure = jax.tree.flatten(params)
    new = iter(jax.tree.leaves(leaves_read))
    pairs = zip(leaves, read, strict=True)
    return jax.tree.unflatten(
        structure, [next(new) if is_read else leaf for leaf, is_read in pairs]
    )


def with_zeros(gradient: PyTree, params: PyTree, read: tuple[bool, ...] | None) -> PyTree:
    """Return `gradient`, a result of `only_read`, with zeros for leaves that are not read."""
    return restored(gradient, jax.tree.map(jnp.zeros_like, params) if read else params, read)

"""The loss on the model: its sums over some rows, and their gradient."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from replicax.core.batch import Batch, unshared
from replicax.core.gathering import Gathering
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
    read: tuple[bool, ...] | None = None
    """For each parameter, whether anybody reads its gradient; None for all. None others are
    computed, and reduced."""
    gathering: Gathering | None = None
    """How the loss, which computes with whole parameters, gets them where they are split."""
    per_replica: ClassVar[bool] = False
    """Whether it cuts a batch into the rows of each replica by itself."""

    def loss_sums(
        self, params: PyTree, extras: PyTree, batch: Batch, view: View
    ) -> tuple[dict[str, WeightedSum], PyTree]:
        """Return the sums of loss and metrics over the rows of `batch`, and the extras after it."""
        return self._called(lambda found: sums(found, batch.mask), params, extras, batch, view)

    def returned(
        self, params: PyTree, extras: PyTree, batch: Batch, view: View
    ) -> tuple[Any, PyTree]:
        """Return what the loss returns for the rows of `batch`, and the extras after it."""
        return self._called(lambda found: found, params, extras, batch, view)

    def _called(
        self, then: Callable[[Any], Any], params: PyTree, extras: PyTree, batch: Batch, view: View
    ) -> tuple[Any, PyTree]:
        """`then` of what the loss returns, and the extras after it."""

        def of_whole(params: PyTree) -> tuple[Any, PyTree]:
            data = self.precision.to_compute(unshared(batch.whole().data))
            with inside(batch.mask, view):
                returned, after = self.definition.apply(
                    lambda model: call(self.loss, model, data, view.key), params, extras, view
                )
            return then(returned), after

        if self.gathering is None:
            return of_whole(self.precision.to_compute(params))
        return self.gathering(of_whole, params, self.precision)

    def step_sums(
        self, params: PyTree, extras: PyTree, batch: Batch, view: View
    ) -> tuple[StepSums, PyTree]:
        """`loss_sums` with the gradient, which is None where nobody reads it."""

        def total(wanted: PyTree) -> tuple[jax.Array, tuple[dict[str, WeightedSum], PyTree]]:
            whole = restored(wanted, params, self.read)
            weighted, after = self.loss_sums(whole, extras, batch, view)
            return differentiated(weighted, view), (weighted, after)

        gradient, (weighted, after) = jax.grad(total, has_aux=True)(only_read(params, self.read))
        return StepSums(jax.tree.map(to_sum, gradient), weighted), after


def differentiated(weighted: dict[str, WeightedSum], view: View) -> jax.Array:
    """Return the number whose gradient a step takes."""
    value = weighted[LOSS].total
    return value if view.scale is None else value * view.scale


def only_read(tree: PyTree, read: tuple[bool, ...] | None) -> PyTree:
    """Return `tree`, shaped as the parameters, with None for what is not read."""
    if read is None:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    kept = [leaf if each else None for leaf, each in zip(leaves, read, strict=True)]
    return jax.tree.unflatten(structure, kept)


def restored(wanted: PyTree, params: PyTree, read: tuple[bool, ...] | None) -> PyTree:
    """Return `params` with `wanted`, as `only_read` leaves it, in the places that are read."""
    if read is None:
        return wanted
    leaves, structure = jax.tree.flatten(params)
    found = iter(jax.tree.leaves(wanted))
    pairs = zip(leaves, read, strict=True)
    return jax.tree.unflatten(structure, [next(found) if each else leaf for leaf, each in pairs])


def with_zeros(gradient: PyTree, params: PyTree, read: tuple[bool, ...] | None) -> PyTree:
    """Return `gradient`, as `only_read` leaves it, with zeros for what is not read."""
    return restored(gradient, jax.tree.map(jnp.zeros_like, params) if read else params, read)

"""The reference of `verify`: means over the real rows of a batch, and `jax.grad` of the loss.

It is what a user would write for one device: a mean of all values, differentiated. Nothing is
padded, and no sum is differentiated and divided afterwards. Of `core.step` it has only how a loss
is called, and nothing that adds, divides or differentiates. The tests compare with it, too.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.data.batch import Batch, unshared
from replicax.core.data.merged import Merge, apart
from replicax.core.data.per_row import ByRow
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import Precision, to_sum
from replicax.core.ground.train_state import Metrics
from replicax.core.jaxprs.row_free import free_of_rows
from replicax.core.models.definition import CallContext, Definition
from replicax.core.models.metric_objects import as_metric
from replicax.core.placement.mesh import DATA
from replicax.core.step.loss import LOSS, Weighted, call
from replicax.core.step.loss_context import inside

Fraction = tuple[jax.Array, jax.Array]
"""Numerator and denominator of a mean."""


def plain_means(returned: Any, rows: jax.Array | None = None) -> Metrics:
    """Return the mean of each value that a loss returned: `jnp.mean`, or sum over sum.

    `rows` has the weight of each row; by default all count alike.
    """
    if rows is None:
        first = _by_name(returned)[LOSS]
        values = first.values if isinstance(first, Weighted) else first
        rows = jnp.ones(jnp.shape(values)[:1] or (1,))
    return _divided(_fractions(returned, rows))


@dataclasses.dataclass(frozen=True)
class PlainLoss:
    """A loss on a model, and its mean over the rows of a batch, on one device."""

    definition: Definition
    loss: Callable[[Any, Any, jax.Array | None], Any]
    precision: Precision
    replicas: int = 1
    """Parts of adjacent rows with random numbers of their own, as replicas have."""
    parts: int = 1
    """Micro-batches, with random numbers and statistics of their own: rows k, k + parts, ..."""
    trained: PyTree = None
    """Whether each parameter is differentiated; None if all are."""

    def gradient(
        self,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        key: jax.Array,
        step: jax.Array,
        times: Any = 1,
    ) -> tuple[PyTree, Metrics, PyTree]:
        """Return the gradient of `times` the mean loss, all means, and the extras after it.

        `batch.mask` has the weight of each row: 1, unless rows are to count unequally.
        """

        def loss(params: PyTree) -> tuple[jax.Array, Any]:
            means, after = self.means(self.with_constants(params), extras, batch, key, step)
            return means[LOSS] * times, (means, after)

        gradient, (means, after) = jax.grad(loss, has_aux=True)(params)
        return gradient, means, after

    def means(
        self, params: PyTree, extras: PyTree, batch: Batch, key: jax.Array, step: jax.Array
    ) -> tuple[Metrics, PyTree]:
        """Return the mean of each value of the loss, and the extras after it."""
        if self.replicas == self.parts == 1:
            context = CallContext(jax.random.fold_in(key, 0), whole=True, step=step)
            found, after = self.returned(params, extras, batch, context)
            return plain_means(found, batch.mask) | other_metrics(found, batch.mask), after
        sums, after = self._of_parts(params, extras, batch, key, step)
        return _divided(sums), after

    def _of_parts(
        self, params: PyTree, extras: PyTree, batch: Batch, key: jax.Array, step: jax.Array
    ) -> tuple[dict[str, Fraction], PyTree]:
        """Return the numerators and denominators of all parts, `[parts, ...]`."""
        shared, own = batch.shared, dataclasses.replace(batch, shared=())
        axis = DATA if self.replicas > 1 else None

        def of_replica(extras: PyTree, rows: Batch, key: jax.Array) -> tuple[Any, PyTree]:
            context = CallContext(key, axis, whole=axis is None, part=self.parts > 1, step=step)
            rows = dataclasses.replace(rows, shared=shared)
            found, after = self.returned(params, extras, rows, context)
            return _fractions(found, rows.mask), after

        def of_part(extras: PyTree, numbered: tuple[jax.Array, Batch]) -> tuple[PyTree, Any]:
            number, rows = numbered
            if axis is None:
                rows = jax.tree.map(lambda leaf: leaf[0], rows)
                sums, after = of_replica(extras, rows, jax.random.fold_in(key, number))
                return after, sums
            keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(self.replicas))
            keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys)
            several = jax.vmap(partial(of_replica, extras), axis_name=axis)
            sums, after = several(rows, keys)
            return jax.tree.map(lambda leaf: leaf[0], after), sums

        cut = jax.tree.map(self._cut, own)
        if self.parts == 1:
            after, sums = of_part(extras, (jnp.int32(0), jax.tree.map(lambda leaf: leaf[0], cut)))
        else:
            after, sums = _in_turn(of_part, extras, cut, self.parts)
        return sums, after

    def with_constants(self, params: PyTree) -> PyTree:
        """Return parameters, constant where they are not trained."""
        if self.trained is None:
            return params
        return jax.tree.map(
            lambda leaf, trained: leaf if trained else lax.stop_gradient(leaf), params, self.trained
        )

    def _cut(self, leaf: jax.Array) -> jax.Array:
        """Reshape `[rows, ...]` to `[parts, replicas, rows of one, ...]`."""
        return jnp.moveaxis(leaf.reshape(self.replicas, -1, self.parts, *leaf.shape[1:]), 2, 0)

    def returned(
        self, params: PyTree, extras: PyTree, batch: Batch, context: CallContext
    ) -> tuple[Any, PyTree]:
        """Return what the loss does for these rows, and the extras after it."""
        data = self.precision.to_compute(unshared(batch.whole().data))
        with inside(batch.mask, context):
            return self.definition.apply(
                lambda model: call(self.loss, model, data, context.key, whole=context.whole),
                *(self.precision.to_compute(params), extras, context),
            )


def _in_turn(
    of_part: Callable[[PyTree, tuple[jax.Array, Batch]], tuple[PyTree, Any]],
    extras: PyTree,
    rows: Batch,
    parts: int,
) -> tuple[PyTree, Any]:
    """Return the extras after all `parts`, and the sums of each; `rows` has `[parts, replicas]`.

    Extras are passed from part to part, but for those that depend on no rows, as a counter: these
    are what they are after one part, as on a whole batch.
    """

    def traced(times: int) -> Any:
        part = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (leaf.shape[1], times * leaf.shape[2], *leaf.shape[3:]), leaf.dtype
            ),
            rows,
        )
        of_rows = lambda extras, number, rows: of_part(extras, (number, rows))[::-1]  # noqa: E731
        return jax.make_jaxpr(of_rows)(extras, jnp.int32(0), part)

    counts = len(jax.tree.leaves(extras)), len(jax.tree.leaves(rows))
    once = jax.tree.unflatten(
        jax.tree.structure(extras), free_of_rows(traced(1), *counts, lambda: traced(2))
    )

    def in_turn(handed: PyTree, numbered: tuple[jax.Array, Batch]) -> tuple[PyTree, Any]:
        begun = jax.tree.map(lambda each, a, b: a if each else b, once, extras, handed)
        after, sums = of_part(begun, numbered)
        later = numbered[0] > 0
        kept = lambda each, a, b: jnp.where(later, a, b) if each else b  # noqa: E731
        return jax.tree.map(kept, once, handed, after), sums

    return lax.scan(in_turn, extras, (jnp.arange(parts), rows))


def _by_name(returned: Any) -> dict[str, Any]:
    values, metrics = returned if isinstance(returned, tuple) else (returned, {})
    return {LOSS: values, **metrics}


def _divided(sums: dict[str, Fraction]) -> Metrics:
    return {name: jnp.sum(above) / jnp.sum(below) for name, (above, below) in sums.items()}


def _fractions(returned: Any, rows: jax.Array) -> dict[str, Fraction]:
    return {
        name: _fraction(value, rows)
        for name, value in _by_name(returned).items()
        if not isinstance(value, ByRow) and _metric(value) is None
    }


def _fraction(value: Any, rows: jax.Array) -> Fraction:
    values = to_sum(jnp.asarray(value.values if isinstance(value, Weighted) else value))
    if not values.ndim:
        return values * jnp.sum(rows), jnp.sum(rows)
    weights = _spread(rows, values)
    if isinstance(value, Weighted):
        weights = weights * _spread(lax.stop_gradient(to_sum(jnp.asarray(value.weights))), values)
    return jnp.sum(jnp.where(weights != 0, values, 0) * weights), jnp.sum(weights)


def _spread(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Return weights of the leading dims of `values` in their shape."""
    dims = (1,) * (values.ndim - weights.ndim)
    return jnp.broadcast_to(weights.reshape(weights.shape + dims), values.shape)


def other_metrics(returned: Any, rows: jax.Array) -> Metrics:
    """Return values by row, and metrics that are no means; `rows` is 0 for padding."""
    found: Metrics = {}
    for name, value in _by_name(returned).items():
        if isinstance(value, ByRow):
            found[name] = ByRow(value.value, rows)
        elif metric := _metric(value):
            found[name] = apart(name, *metric, rows)
    return found


def _metric(value: Any) -> tuple[Any, Merge] | None:
    return None if isinstance(value, jax.Array | Weighted) else as_metric(value)

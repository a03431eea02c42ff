"""Run a custom step, over any pytree of state."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.custom.summing import Examiner, Primitives, mean
from replicax.core.data.batch import Batch, ExtraRows
from replicax.core.data.merged import Merged, apart
from replicax.core.data.per_row import (
    ByRow,
    checked_rows,
    is_rows_of_state,
    map_rows_of_state,
    rows_of_state,
)
from replicax.core.ground.leaves import PyTree, by_dtype, is_random_key, numbers
from replicax.core.ground.precision import Precision, to_sum
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.models.definition import CallContext, is_trainable
from replicax.core.models.metric_objects import as_metric
from replicax.core.models.pytree import CustomState
from replicax.core.placement.mesh import Axis
from replicax.core.step.base import Accumulator, Apply, ReduceReplicas, StepResult, StepSums
from replicax.core.step.loss import LOSS, WeightedSum
from replicax.core.step.loss_context import inside
from replicax.core.step.update import Summing, step_key
from replicax.errors import StateError

StepFunction = Callable[[Any, PyTree, jax.Array], tuple[Any, Metrics]]
"""`step(state, batch, key) -> (state, metrics)`."""


def custom_update(
    state: TrainState,
    batch: Batch,
    axis: Axis | None,
    *,
    step: StepFunction,
    definition: CustomState,
    accumulator: Accumulator,
    reduce: ReduceReplicas,
    precision: Precision,
    apply: Apply,
    examiner: Examiner | None = None,
) -> StepResult:
    """Run one custom step; all arrays of its state are the `params`.

    `apply` is `keep`, or a wrapper. `examiner` observes the step's parts while it is checked.
    """
    key = step_key(state)
    if axis is not None:
        key = accumulator.replica_key(key, axis)
    primitives = Primitives(Summing(accumulator, reduce, axis), precision, examiner)
    gather, row_numbers = accumulator.gather, accumulator.row_numbers
    context = CallContext(key, axis, step=state.step, gather=gather, row_numbers=row_numbers)
    before = state.params
    if examiner is None:
        before, batch = _with_copies(before, batch, primitives.summing.gather)
    batch = batch.whole()
    with inside(batch.mask, context, (primitives, batch)) as here:
        returned = step(definition.merge(before, {}), batch.data, key)
        params, metrics, rows = _returned(returned, definition, before, batch.size)
        merged = _merged(metrics, batch.mask, primitives)
        metrics = _numbers({name: metrics[name] for name in metrics if name not in merged})
        bad_rows = [] if examiner else _not_finite_rows(before, params)
    if examiner is not None:
        examiner.step(here)
        named_rows = {f"metrics.{name}": value for name, value in rows.items()}
        for name, value in (named_rows | _rows_by_name(params)).items():
            examiner.see(name, ByRow(value))
    params = _with_padding_kept(state.params, params, batch.mask)
    one = jnp.ones((), jnp.float32)
    named = {name: WeightedSum(value, one) for name, value in metrics.items()}
    total = StepSums([*_went_wrong(state.params, params), *bad_rows], named)
    with jax.named_scope("update"):
        state, extra_metrics = apply(state, total, params, state.reduction)
    return state, {**metrics, **merged, **extra_metrics}, rows


def keep(
    state: TrainState, _total: StepSums, params: PyTree, _reduction_state: PyTree
) -> tuple[TrainState, Metrics]:
    """Return the state after a custom step."""
    return dataclasses.replace(state, step=state.step + 1, params=params), {}


def _returned(
    returned: Any, definition: CustomState, before: PyTree, count: int
) -> tuple[PyTree, Metrics, dict[str, PyTree]]:
    """Return the arrays of the state, the metrics, and those by row, that a step returned."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise StateError(
            f"the step returned a {type(returned).__name__}; it must return the next state "
            "and a dict of metrics: return state, metrics"
        )
    after, metrics = returned[0], dict(returned[1])
    marked = [name for name, value in metrics.items() if isinstance(value, ByRow)]
    rows = {name: _of_rows(name, metrics.pop(name).value, count) for name in marked}
    return definition.arrays(after, before), metrics, rows


def _merged(metrics: Metrics, mask: jax.Array, primitives: Primitives) -> dict[str, Merged]:
    """Return the metrics that are no means, of all rows; a step may have them from a loss."""
    known = {name: as_metric(value) for name, value in metrics.items()}
    own = {name: apart(name, *metric, mask) for name, metric in known.items() if metric}
    if primitives.examiner:
        for name, part in own.items():
            primitives.examiner.see_merged(name, part)
    else:
        _, own = primitives.summing.of_all_rows(own)
    return {n: value for n, value in metrics.items() if isinstance(value, Merged)} | own


def _numbers(metrics: Metrics) -> Metrics:
    """Return metrics in the dtype of sums; `StateError` if one is no number."""
    for name, value in metrics.items():
        dtype, shape = jnp.result_type(value), jnp.shape(value)
        if shape or not jnp.issubdtype(dtype, jnp.floating):
            raise StateError(
                f"the step returned the metric {name!r} as {dtype}{list(shape)}; a metric must be "
                "a scalar float: use rx.mean for rows, or rx.ByRow to return them, jnp.float32 of "
                "a count"
            )
    if LOSS not in metrics:
        raise StateError(
            f"the step returned the metrics {', '.join(metrics) or 'none'}; 'loss' is required "
            "to detect NaN and spikes: name one 'loss'"
        )
    return {name: to_sum(jnp.asarray(value)) for name, value in metrics.items()}


def _of_rows(name: str, value: Any, count: int) -> PyTree:
    """Return a result by row; that of a set of the batch with the set's own mask."""
    if not isinstance(value, ExtraRows) or value.rows is None:
        return checked_rows(name, value, count)
    return ByRow(checked_rows(name, value.value, value.rows.size), value.rows.mask)


def _went_wrong(before: PyTree, after: PyTree) -> list[jax.Array]:
    """Return the next state's floats for a guard, 0 where the previous ones were not finite."""
    trees = (map_rows_of_state(lambda _: (), tree) for tree in (before, after))
    pairs = zip(*map(jax.tree.leaves, trees), strict=True)
    return [jnp.where(jnp.isfinite(b), a, 0) for b, a in pairs if is_trainable(a)]


def _not_finite_rows(before: PyTree, after: PyTree) -> list[jax.Array]:
    """Return means over all replicas of the rows of the next state; NaN where one is not finite."""
    trees = map(rows_of_state, (before, after))
    pairs = zip(*map(jax.tree.leaves, trees), strict=True)
    bad = [jnp.isfinite(b) & ~jnp.isfinite(a) for b, a in pairs if is_trainable(a)]
    of_rows = [jnp.where(jnp.any(each.reshape(len(each), -1), axis=1), jnp.nan, 0) for each in bad]
    found: list[jax.Array] = mean(of_rows) if of_rows else []
    return found


def _rows_by_name(state: PyTree) -> dict[str, PyTree]:
    """Return the rows of a state by the names that errors have for them."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_rows_of_state)
    return {
        f"state.{jax.tree_util.keystr(path, simple=True, separator='.')}": leaf.value
        for path, leaf in leaves
        if is_rows_of_state(leaf)
    }


def _with_copies(
    params: PyTree,
    batch: Batch,
    gather: Callable[[list[jax.Array]], list[jax.Array]] | None,
) -> tuple[PyTree, Batch]:
    """Return a state and a batch whose padded rows are copies of the first real row of all.

    A padded entry of the state is its own, and may be one that no step has written: a loss that is
    not finite there would make the gradient NaN, although its weight is 0. A replica may have no
    real row, so one of each replica is gathered; that costs one row of the batch and the state.
    """
    if not (states := [rows.value for rows in rows_of_state(params)]):
        return params, batch
    own = states, dataclasses.replace(batch, count=None, shared=(), sets=())
    one = jax.tree.map(lambda leaf: _picked(numbers(leaf), batch.mask), own)
    if gather is not None:
        of_each = by_dtype(gather, jax.tree.map(lambda leaf: leaf[None], one))
        mask = of_each[1].mask
        one = jax.tree.map(lambda leaf: _picked(leaf, mask), of_each)
    states, filled = jax.tree.map(lambda leaf, row: _where(batch.mask, leaf, row), own, one)
    values = iter(states)
    return map_rows_of_state(
        lambda rows: dataclasses.replace(rows, value=next(values)), params
    ), dataclasses.replace(batch, data=filled.data, index=filled.index)


def _with_padding_kept(before: PyTree, after: PyTree, mask: jax.Array) -> PyTree:
    """Return the state after a step, with the rows of padding as they were."""
    old = iter(rows_of_state(before))

    def kept(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(_per_row(mask, new), new, old)

    return map_rows_of_state(lambda rows: jax.tree.map(kept, rows, next(old)), after)


def _picked(leaf: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the first row of numbers that is real; the last one if none is.

    As a sum, which the compiler computes where the rows are: an index would gather all of them.
    """
    places = jnp.arange(len(mask))
    is_first = places == jnp.min(jnp.where(mask > 0, places, len(mask) - 1))
    row = jnp.where(_per_row(is_first, leaf), leaf, jnp.zeros_like(leaf))
    return jnp.any(row, axis=0) if leaf.dtype == bool else jnp.sum(row, axis=0, dtype=leaf.dtype)


def _where(mask: jax.Array, leaf: jax.Array, row: jax.Array) -> jax.Array:
    if is_random_key(leaf):
        row = jax.random.wrap_key_data(row, impl=jax.random.key_impl(leaf))
    return jnp.where(_per_row(mask, leaf), leaf, row)


def _per_row(mask: jax.Array, leaf: jax.Array) -> jax.Array:
    return mask.reshape(-1, *[1] * (leaf.ndim - 1)) > 0

"""Custom steps over any pytree of state, and the primitives to write them with."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from replicax.arguments import typed
from replicax.core.data.batch import Batch, RowSet, Shared, row_count
from replicax.core.data.per_row import (
    PerRow,
    checked_rows,
    is_rows_of_state,
    map_rows_of_state,
    rows_of_state,
)
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import Precision, to_sum
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.models.definition import CallContext, is_trainable
from replicax.core.models.pytree import CustomState
from replicax.core.models.split import split_model
from replicax.core.models.stateful import Stateful
from replicax.core.placement.mesh import Axis
from replicax.core.step.accumulate import Sequential
from replicax.core.step.base import Accumulator, Apply, Reduce, StepResult, StepSums, no_reduction
from replicax.core.step.loss import LOSS, Weighted, WeightedSum, weighted_sum
from replicax.core.step.loss_context import LossContext, current, inside
from replicax.core.step.objective import LossFunction, Objective
from replicax.core.step.update import Summing, mean_gradient, step_key
from replicax.errors import LossError, StateError

StepFunction = Callable[[Any, PyTree, jax.Array], tuple[Any, Metrics]]
"""`step(state, batch, key) -> (state, metrics)`."""


class Examiner(Protocol):
    """Observes a step while it is traced."""

    def step_sums(
        self,
        objective: Objective,
        params: PyTree,
        extras: PyTree,
        rows: Batch,
        context: CallContext,
    ) -> tuple[StepSums, PyTree]:
        """Return what `objective.step_sums` does."""

    def see(self, name: str, value: Any) -> None:
        """Called with rows whose mean is taken, or that are returned."""

    def step(self, here: LossContext) -> None:
        """Called when the step has returned; `here` records its requests."""


@dataclasses.dataclass(frozen=True)
class Primitives:
    """How `value_and_grad` and `mean` compute sums in one call of a step."""

    summing: Summing
    precision: Precision
    examiner: Examiner | None = None


_ALONE = Primitives(Summing(Sequential(), no_reduction, None), Precision("float32"))


@typed
def value_and_grad(loss: LossFunction, *, rows: bool = False) -> Callable[..., tuple[Any, ...]]:
    """Return a function that computes the means of `loss` over the global batch and the gradient.

    For a custom step, `DataParallel(step=step)`: the rows of all replicas are summed in
    micro-batches, reduced once, and divided once, as in the built-in step. Outside a step, `batch`
    is the global batch.

    Examples:
        >>> def step(state, batch, key):
        ...     means, gradient = rx.value_and_grad(loss)(state["model"], batch, key)
        ...     updates, moments = optimizer.update(gradient, state["moments"], state["model"])
        ...     model = optax.apply_updates(state["model"], updates)
        ...     return {"model": model, "moments": moments}, means

    Args:
        loss: `loss(model, batch, key) -> values`, as for `DataParallel`.
        rows: whether to return the values of each row, too.

    Returns:
        `function(model, batch, key=None) -> (means, gradient)`, or `(means, gradient, rows)`.
        `model` is of any kind supported by `DataParallel.init`, `batch` a pytree of arrays with one
        entry for each row of the step's batch or an `rx.RowSet` of it, and without a key the loss
        is called as in evaluation. `means` are float32 scalars, `"loss"` and the metrics, equal on
        all replicas; the gradient, that of the mean loss, has
        the model's structure, with None for leaves that are not trainable. An NNX model keeps its
        writes, and its gradient has the structure of `nnx.state(model, nnx.Param)`. For an
        `rx.Stateful` it is `(means, gradient of its model, state)`, with the state that the loss
        wrote, and for a Linen module with more collections than params these. `means["loss"]` may
        be differentiated once by `model`, as a line search does; no other result may be. With
        `rows`, the last result is a dict of the values `[rows, ...]` behind `"loss"` and the
        metrics that have rows, and of each `rx.PerRow` among them: those of the rows that the step
        sees, not differentiated.

    Raises:
        LossError: the loss violates its contract, or another result is differentiated.
    """

    def means_and_gradient(
        model: Any, batch: PyTree, key: jax.Array | None = None
    ) -> tuple[Any, ...]:
        definition, given, extras = split_model(model)
        params = jax.lax.stop_gradient(given)
        primitives, state, seen = _seen("value_and_grad", batch, params, extras)
        objective = Objective(definition, loss, primitives.precision, every_row=rows)
        examiner = primitives.examiner
        part = partial(examiner.step_sums, objective) if examiner else objective.step_sums
        total, after, _ = primitives.summing(part, state, seen, key)
        # The state of a Stateful is equal on all replicas only if the loss computes it so.
        own, alike = ((after,), ()) if isinstance(model, Stateful) else ((), (after,))
        results = *sums_of_all_replicas((total.means(), mean_gradient(total, params), *alike)), *own
        means, gradient, after = _of_known_gradient(given, *results)
        found = means, definition.as_model(gradient), *definition.written(model, after)
        return (*found, jax.lax.stop_gradient(total.rows)) if rows else found

    return means_and_gradient


def mean(values: PyTree) -> PyTree:
    """Return the mean of `values` over the rows of the global batch, excluding padding.

    For a custom step; the result is equal on all replicas. Outside a step, the plain mean.

    Examples:
        >>> def step(state, batch, key):
        ...     return state, {"loss": rx.mean(batch["x"][:, 0] ** 2)}
        >>> dp = rx.DataParallel(step=step)
        >>> state, metrics = dp.step(dp.init(model), batch)

    Args:
        values: a pytree of floats `[rows, ...]`, such as the gradients of each row, or of
            `rx.Weighted` of floats; or an `rx.RowSet` of these.

    Returns:
        The same pytree with float32 arrays `[...]`; NaN where the total weight is 0.

    Raises:
        LossError: `values` has not the rows of the step's batch, or is differentiated.
    """
    primitives, state, rows = _seen("mean", values, (), ())
    values = rows.data

    def part(_params: PyTree, extras: PyTree, rows: Batch, _context: CallContext) -> Any:
        sums = {}
        for n, value in enumerate(jax.tree.leaves(rows.data, is_leaf=_is_weighted)):
            if primitives.examiner:
                primitives.examiner.see("rx.mean", value)
            sums[str(n)] = weighted_sum("rx.mean", value, rows.mask, axis=0)
        return StepSums((), sums), extras

    total, _, _ = primitives.summing(part, state, rows, None)
    means = sums_of_all_replicas(list(total.means().values()))
    return jax.tree.unflatten(jax.tree.structure(values, is_leaf=_is_weighted), means)


def _is_weighted(node: Any) -> bool:
    return isinstance(node, Weighted)


def custom_update(
    state: TrainState,
    batch: Batch,
    axis: Axis | None,
    *,
    step: StepFunction,
    definition: CustomState,
    accumulator: Accumulator,
    reduce: Reduce,
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
    context = CallContext(key, axis, step=state.step, gather=accumulator.gather)
    with inside(batch.mask, context, (primitives, batch.index)) as here:
        returned = step(definition.merge(state.params, {}), batch.whole().data, key)
        params, metrics, rows = _returned(returned, definition, state.params, batch.size)
        bad_rows = [] if examiner else _not_finite_rows(state.params, params)
    if examiner is not None:
        examiner.step(here)
        named_rows = {f"metrics.{name}": value for name, value in rows.items()}
        for name, value in (named_rows | _rows_by_name(params)).items():
            examiner.see(name, PerRow(value))
    params = _with_padding_kept(state.params, params, batch.mask)
    one = jnp.ones((), jnp.float32)
    named = {name: WeightedSum(value, one) for name, value in metrics.items()}
    total = StepSums([*_went_wrong(state.params, params), *bad_rows], named)
    with jax.named_scope("update"):
        state, extra_metrics = apply(state, total, params, state.reduction)
    return state, {**metrics, **extra_metrics}, rows


def keep(
    state: TrainState, _total: StepSums, params: PyTree, _reduction_state: PyTree
) -> tuple[TrainState, Metrics]:
    """Return the state after a custom step."""
    return dataclasses.replace(state, step=state.step + 1, params=params), {}


def _seen(
    name: str, rows: PyTree, params: PyTree, extras: PyTree
) -> tuple[Primitives, TrainState, Batch]:
    """Return the active primitives, and the parameters and rows that they sum over."""
    if isinstance(rows, Shared):
        raise LossError(
            f"rx.{name} was given an rx.Shared, which has no rows: mark rows of another number "
            "than those of the batch as rx.RowSet"
        )
    of_set = isinstance(rows, RowSet)
    count, here, step = row_count(rows.value if of_set else rows), current(), None
    if here is None:
        primitives, rows = _ALONE, rows.value if of_set else rows
        batch = Batch(rows, jnp.ones(count, jnp.float32), jnp.arange(count, dtype=jnp.int32))
    elif here.primitives is None:
        raise LossError(
            f"rx.{name} was called in a loss, which sees only some rows of a batch; it sums over "
            "all rows in a step: use jax.grad inside a loss, and return one value per row"
        )
    else:
        (primitives, index), seen = here.primitives, here.mask.shape[0]
        step = here.context.step
        if of_set and (rows.rows is None or count != rows.rows.size):
            raise LossError(
                f"rx.{name} was given an rx.RowSet of {count} rows that is none of the batch: use "
                "batch[...].map(function), which keeps its rows"
            )
        if not of_set and count != seen:
            raise LossError(
                f"rx.{name} was given {count} rows, and the step sees {seen}: pass arrays with "
                "one entry for each row of the batch, [rows, k, ...] for k entries per row, or an "
                "rx.RowSet of the batch"
            )
        batch = rows.rows if of_set else Batch(rows, here.mask, index)
    state = TrainState(step, params=params, opt_state=(), extras=extras, seed=())
    return primitives, state, batch


@jax.custom_vjp
def _of_known_gradient(_params: PyTree, *results: Any) -> Any:
    """Return `results`, the means, gradient and state; that is the loss's gradient by `params`."""
    return results


def _remembered(_params: Any, *results: Any) -> tuple[Any, PyTree]:
    perturbed = lambda leaf: hasattr(leaf, "perturbed")  # noqa: E731
    values = jax.tree.map(lambda leaf: leaf.value, results, is_leaf=perturbed)
    return values, values[1]


def _derivative(gradient: PyTree, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    of_loss, others = cotangents[0][LOSS], ({**cotangents[0], LOSS: None}, cotangents[1:])
    if any(not isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(others)):
        _refuse()
    of_params = jax.tree.map(lambda leaf: (of_loss * leaf).astype(leaf.dtype), gradient)
    return of_params, None, None, None


_of_known_gradient.defvjp(_remembered, _derivative, symbolic_zeros=True)


@jax.jit
def sums_of_all_replicas(outputs: PyTree) -> PyTree:
    """Return `outputs`, equal on all replicas; `jaxprs.row_dependence` finds it by name."""
    return _constant(outputs)


@jax.custom_jvp
def _constant(outputs: PyTree) -> PyTree:
    """Return `outputs`, not differentiable: a replica's derivative is not the total derivative."""
    return outputs


@_constant.defjvp
def _refuse(*_: Any) -> Any:
    raise LossError(
        "rx.value_and_grad or rx.mean was differentiated, and only the loss of the former has a "
        "known derivative, by its model: pass rx.value_and_grad a loss that returns one value per "
        "row, and differentiate only means['loss'], by the model"
    )


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
    marked = [name for name, value in metrics.items() if isinstance(value, PerRow)]
    rows = {name: checked_rows(name, metrics.pop(name).value, count) for name in marked}
    for name, value in metrics.items():
        dtype, shape = jnp.result_type(value), jnp.shape(value)
        if shape or not jnp.issubdtype(dtype, jnp.floating):
            raise StateError(
                f"the step returned the metric {name!r} as {dtype}{list(shape)}; a metric must be "
                "a scalar float: use rx.mean for rows, or rx.PerRow to return them, jnp.float32 of "
                "a count"
            )
    if LOSS not in metrics:
        raise StateError(
            f"the step returned the metrics {', '.join(metrics) or 'none'}; 'loss' is required "
            "to detect NaN and spikes: name one 'loss'"
        )
    params = definition.arrays(after, before)
    return params, {name: to_sum(jnp.asarray(value)) for name, value in metrics.items()}, rows


def _went_wrong(before: PyTree, after: PyTree) -> list[jax.Array]:
    """Return the next state's floats for a guard, 0 where the previous ones were not finite."""
    trees = (map_rows_of_state(lambda _: (), tree) for tree in (before, after))
    pairs = zip(*map(jax.tree.leaves, trees), strict=True)
    return [jnp.where(jnp.isfinite(b), a, 0) for b, a in pairs if is_trainable(a)]


def _not_finite_rows(before: PyTree, after: PyTree) -> list[jax.Array]:
    """Return the same of the rows of a state: their means over all replicas, NaN for a bad one."""
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


def _with_padding_kept(before: PyTree, after: PyTree, mask: jax.Array) -> PyTree:
    """Return the state after a step, with the rows of padding as they were."""
    old = iter(rows_of_state(before))

    def kept(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *[1] * (new.ndim - 1)) > 0, new, old)

    return map_rows_of_state(lambda rows: jax.tree.map(kept, rows, next(old)), after)

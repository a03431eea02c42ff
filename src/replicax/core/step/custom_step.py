"""Custom steps over any pytree of state, and the primitives to write them with."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from replicax.core.data.batch import Batch, row_count
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import Precision, to_sum
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.models.definition import CallContext, is_trainable
from replicax.core.models.pytree import CustomState, PytreeDefinition
from replicax.core.models.split import split_model
from replicax.core.placement.mesh import Axis
from replicax.core.step.accumulate import Sequential
from replicax.core.step.base import Accumulator, Apply, Reduce, StepSums, no_reduction
from replicax.core.step.loss import LOSS, Weighted, WeightedSum, weighted_sum
from replicax.core.step.loss_context import LossContext, current, inside
from replicax.core.step.objective import LossFunction, Objective
from replicax.core.step.update import Summing, mean_gradient, step_key
from replicax.errors import ConfigError, LossError, StateError

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
        """Called with rows whose mean is taken."""

    def step(self, here: LossContext) -> None:
        """Called when the step has returned; `here` records its requests."""


@dataclasses.dataclass(frozen=True)
class Primitives:
    """How `value_and_grad` and `mean` compute sums in one call of a step."""

    summing: Summing
    precision: Precision
    examiner: Examiner | None = None


_ALONE = Primitives(Summing(Sequential(), no_reduction, None), Precision("float32"))


def value_and_grad(loss: LossFunction) -> Callable[..., tuple[Metrics, PyTree]]:
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

    Returns:
        `function(model, batch, key=None) -> (means, gradient)`. `model` is of any kind supported by
        `DataParallel.init`, `batch` a pytree of arrays with one entry for each row of the step's
        batch, and without a key the loss is called as in evaluation. `means` are float32 scalars,
        `"loss"` and the metrics, equal on all replicas; the gradient, that of the mean loss, has
        the model's structure, with None for leaves that are not trainable. An NNX model keeps its
        writes, and its gradient is a dict as returned by `nnx.to_pure_dict`. `means["loss"]` may be
        differentiated once by `model`, as a line search does; no other result may be.

    Raises:
        LossError: the loss violates its contract, or another result is differentiated.
    """

    def means_and_gradient(
        model: Any, batch: PyTree, key: jax.Array | None = None
    ) -> tuple[Metrics, PyTree]:
        definition, given, extras = split_model(model)
        params = jax.lax.stop_gradient(given)
        if getattr(definition, "writes", False):
            raise ConfigError(
                "rx.value_and_grad was given an rx.Stateful and cannot return its state: pass its "
                "loss and optimizer to DataParallel, or use a Flax NNX model, which keeps it"
            )
        primitives, state, rows = _seen("value_and_grad", batch, params, extras)
        objective, examiner = Objective(definition, loss, primitives.precision), primitives.examiner
        part = partial(examiner.step_sums, objective) if examiner else objective.step_sums
        total, after, _ = primitives.summing(part, state, rows, key)
        outputs = total.means(), mean_gradient(total, params)
        (means, gradient), after = sums_of_all_replicas((outputs, after))
        means, gradient = _of_known_gradient(given, means, gradient)
        if hasattr(definition, "write"):
            definition.write(model, after)
        if isinstance(definition, PytreeDefinition):
            gradient = definition.as_model(gradient)
        return means, gradient

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
            `rx.Weighted` of floats.

    Returns:
        The same pytree with float32 arrays `[...]`; NaN where the total weight is 0.

    Raises:
        LossError: `values` has not the rows of the step's batch, or is differentiated.
    """
    primitives, state, rows = _seen("mean", values, (), ())

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
) -> tuple[TrainState, Metrics]:
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
    if examiner is not None:
        examiner.step(here)
    params, metrics = _returned(returned, definition, state.params)
    one = jnp.ones((), jnp.float32)
    named = {name: WeightedSum(value, one) for name, value in metrics.items()}
    total = StepSums(_went_wrong(state.params, params), named)
    with jax.named_scope("update"):
        state, extra_metrics = apply(state, total, params, state.reduction)
    return state, {**metrics, **extra_metrics}


def keep(
    state: TrainState, _total: StepSums, params: PyTree, _reduction_state: PyTree
) -> tuple[TrainState, Metrics]:
    """Return the state after a custom step."""
    return dataclasses.replace(state, step=state.step + 1, params=params), {}


def _seen(
    name: str, rows: PyTree, params: PyTree, extras: PyTree
) -> tuple[Primitives, TrainState, Batch]:
    """Return the active primitives, and the parameters and rows that they sum over."""
    count, here, step = row_count(rows), current(), None
    if here is None:
        primitives = _ALONE
        batch = Batch(rows, jnp.ones(count, jnp.float32), jnp.arange(count, dtype=jnp.int32))
    elif here.primitives is None:
        raise LossError(
            f"rx.{name} was called in a loss, which sees only some rows of a batch; it sums over "
            "all rows in a step: use jax.grad inside a loss, and return one value per row"
        )
    else:
        (primitives, index), seen = here.primitives, here.mask.shape[0]
        step = here.context.step
        if count != seen:
            raise LossError(
                f"rx.{name} was given {count} rows, and the step sees {seen}: pass arrays with "
                "one entry for each row of the batch, or [rows, k, ...] for k entries per row"
            )
        batch = Batch(rows, here.mask, index)
    state = TrainState(step, params=params, opt_state=(), extras=extras, seed=())
    return primitives, state, batch


@jax.custom_vjp
def _of_known_gradient(_params: PyTree, means: Metrics, gradient: PyTree) -> tuple[Metrics, PyTree]:
    """Return `means` and `gradient`, the loss with that derivative by `params`."""
    return means, gradient


def _remembered(params: Any, means: Any, gradient: Any) -> tuple[tuple[Metrics, PyTree], PyTree]:
    means, gradient = jax.tree.map(
        lambda leaf: leaf.value, (means, gradient), is_leaf=lambda leaf: hasattr(leaf, "perturbed")
    )
    return (means, gradient), gradient


def _derivative(gradient: PyTree, cotangents: tuple[Metrics, PyTree]) -> tuple[PyTree, None, None]:
    means, of_gradient = cotangents
    of_loss = means[LOSS]
    others = [of_gradient, *(each for name, each in means.items() if name != LOSS)]
    if any(not isinstance(leaf, SymbolicZero) for leaf in jax.tree.leaves(others)):
        raise _differentiated()
    return jax.tree.map(lambda leaf: (of_loss * leaf).astype(leaf.dtype), gradient), None, None


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
def _refuse(_primals: Any, _tangents: Any) -> Any:
    raise _differentiated()


def _differentiated() -> LossError:
    return LossError(
        "rx.value_and_grad or rx.mean was differentiated, and only the loss of the former has a "
        "known derivative, by its model: pass rx.value_and_grad a loss that returns one value per "
        "row, and differentiate only means['loss'], by the model"
    )


def _returned(returned: Any, definition: CustomState, before: PyTree) -> tuple[PyTree, Metrics]:
    """Return the arrays of the state, and the metrics, that a step returned."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise StateError(
            f"the step returned a {type(returned).__name__}; it must return the next state "
            "and a dict of metrics: return state, metrics"
        )
    after, metrics = returned
    for name, value in metrics.items():
        dtype, shape = jnp.result_type(value), jnp.shape(value)
        if shape or not jnp.issubdtype(dtype, jnp.floating):
            raise StateError(
                f"the step returned the metric {name!r} as {dtype}{list(shape)}; a metric must be "
                "a scalar float: use rx.mean for rows, and jnp.float32 for a count"
            )
    if LOSS not in metrics:
        raise StateError(
            f"the step returned the metrics {', '.join(metrics) or 'none'}; 'loss' is required "
            "to detect NaN and spikes: name one 'loss'"
        )
    params = definition.arrays(after, before)
    return params, {name: to_sum(jnp.asarray(value)) for name, value in metrics.items()}


def _went_wrong(before: PyTree, after: PyTree) -> list[jax.Array]:
    """Return the next state's floats for a guard, 0 where the previous ones were not finite."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return [jnp.where(jnp.isfinite(b), a, 0) for b, a in pairs if is_trainable(a)]

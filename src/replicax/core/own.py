"""A step of one's own, over any pytree of state, and the primitives that it is written with."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from replicax.core.accumulate import Accumulator, Apply, Sequential
from replicax.core.batch import Batch, row_count
from replicax.core.inside import Inside, current, inside
from replicax.core.loss import LOSS, WeightedSum, weighted_sum
from replicax.core.mesh import Axis
from replicax.core.models.definition import PyTree, View, is_trainable
from replicax.core.models.pytree import OwnState
from replicax.core.models.split import split_model
from replicax.core.objective import LossFunction, Objective, StepSums
from replicax.core.precision import Precision, to_sum
from replicax.core.reduction import Reduce, as_they_are
from replicax.core.update import Metrics, Summing, TrainState, mean_gradient, step_key
from replicax.errors import ConfigError, LossError, StateError

StepFunction = Callable[[Any, PyTree, jax.Array], tuple[Any, Metrics]]
"""`step(state, batch, key) -> (state, metrics)`."""


class Examiner(Protocol):
    """Told of what a step does while it is traced."""

    def loss(self, objective: Objective, state: TrainState, rows: Batch, outside: bool) -> None:
        """It sums a loss over `rows`; `outside` of any loop."""

    def step(self, here: Inside) -> None:
        """It has returned; `here` knows what it asked for."""


@dataclasses.dataclass(frozen=True)
class Primitives:
    """The means of `value_and_grad` and `mean` to sum in one call of a step."""

    summing: Summing
    precision: Precision
    examiner: Examiner | None = None


_ALONE = Primitives(Summing(Sequential(), as_they_are, None), Precision("float32"))


def value_and_grad(loss: LossFunction) -> Callable[..., tuple[Metrics, PyTree]]:
    """Return a function of the means of `loss` over the global batch, and their gradient.

    For a step of one's own, `DataParallel(step=step)`: the rows of all replicas are summed in
    micro-batches, reduced once, and divided once, as in the step that Replicax writes. Outside of
    a step the batch is the global one.

    Examples:
        >>> def step(state, batch, key):
        ...     means, gradient = rx.value_and_grad(loss)(state["model"], batch, key)
        ...     updates, moments = optimizer.update(gradient, state["moments"], state["model"])
        ...     model = optax.apply_updates(state["model"], updates)
        ...     return {"model": model, "moments": moments}, means

    Args:
        loss: `loss(model, batch, key) -> values`, as for `DataParallel`.

    Returns:
        `function(model, batch, key=None) -> (means, gradient)`. `model` is of any kind that
        `DataParallel.init` takes, `batch` a pytree of arrays with one entry for each row of the
        step's batch, and without a key the loss is called as in evaluation. `means` are float32
        scalars, `"loss"` and the metrics, equal on all replicas; the gradient, that of the mean
        loss, has the model's structure, None where nothing trains. An NNX model keeps what it
        writes, and its gradient is a dict as `nnx.to_pure_dict` gives it.

    Raises:
        LossError: the loss does not keep its contract, or this is differentiated.
    """

    def means_and_gradient(
        model: Any, batch: PyTree, key: jax.Array | None = None
    ) -> tuple[Metrics, PyTree]:
        definition, params, extras = split_model(model)
        if getattr(definition, "writes", False):
            raise ConfigError(
                "rx.value_and_grad was given an rx.Stateful, whose state it cannot hand back: give "
                "DataParallel its loss and optimizer, or use a Flax NNX model, which keeps it"
            )
        primitives, state, rows = _seen("value_and_grad", batch, params, extras)
        objective = Objective(definition, loss, primitives.precision)
        if primitives.examiner is not None:
            here = current()
            outside = here is not None and here.trace == get_opaque_trace_state()
            primitives.examiner.loss(objective, state, rows, outside)
        total, after, _ = primitives.summing(objective.step_sums, state, rows, key)
        found = total.means(), mean_gradient(total, params)
        (means, gradient), after = sums_of_all_replicas((found, after))
        if hasattr(definition, "write"):
            definition.write(model, after)
        return means, gradient

    return means_and_gradient


def mean(values: Any) -> jax.Array:
    """Return the mean of `values` over the rows of the global batch, padding left out.

    For a step of one's own: equal on all replicas. Outside of a step, the plain mean. It is one
    number; `jax.vmap(rx.mean, in_axes=-1)` has one for each entry of the last dim.

    Examples:
        >>> def step(state, batch, key):
        ...     return state, {"loss": rx.mean(batch["x"][:, 0] ** 2)}
        >>> dp = rx.DataParallel(step=step)
        >>> state, metrics = dp.step(dp.init(model), batch)

    Args:
        values: floats `[rows, ...]`, or an `rx.Weighted` of such.

    Returns:
        float32 scalar; NaN where nothing has any weight.

    Raises:
        LossError: another number of rows than the step's batch has, or this is differentiated.
    """
    primitives, state, rows = _seen("mean", values, (), ())

    def part(_params: PyTree, extras: PyTree, rows: Batch, _view: View) -> Any:
        return StepSums((), {LOSS: weighted_sum("rx.mean", rows.data, rows.mask)}), extras

    total, _, _ = primitives.summing(part, state, rows, None)
    found: jax.Array = sums_of_all_replicas(total.means()[LOSS])
    return found


def own_update(
    state: TrainState,
    batch: Batch,
    axis: Axis | None,
    *,
    step: StepFunction,
    definition: OwnState,
    accumulator: Accumulator,
    reduce: Reduce,
    precision: Precision,
    apply: Apply,
    examiner: Examiner | None = None,
    gather: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[TrainState, Metrics]:
    """One step that somebody wrote; all arrays of its own state are the `params`.

    `apply` is `keep`, or a wrapper. `examiner` is told of the step's parts where it is looked at,
    and `gather` gathers rows where no axis does.
    """
    key = step_key(state)
    if axis is not None:
        key = accumulator.replica_key(key, axis)
    primitives = Primitives(Summing(accumulator, reduce, axis), precision, examiner)
    view = View(key, axis, step=state.step, gather=gather)
    with inside(batch.mask, view, (primitives, batch.index)) as here:
        returned = step(definition.merge(state.params, {}), batch.whole().data, key)
    if examiner is not None:
        examiner.step(here)
    params, metrics = _returned(returned, definition, state.params)
    one = jnp.ones((), jnp.float32)
    named = {name: WeightedSum(value, one) for name, value in metrics.items()}
    total = StepSums(_went_wrong(state.params, params), named)
    with jax.named_scope("update"):
        state, verdicts = apply(state, total, params, state.reduction)
    return state, {**metrics, **verdicts}


def keep(
    state: TrainState, _total: StepSums, params: PyTree, _carried: PyTree
) -> tuple[TrainState, Metrics]:
    """Return the state with what a step of one's own made of it."""
    return dataclasses.replace(state, step=state.step + 1, params=params), {}


def _seen(
    name: str, rows: PyTree, params: PyTree, extras: PyTree
) -> tuple[Primitives, TrainState, Batch]:
    """The primitives in force, and the parameters and rows that they sum over."""
    count, here, step = row_count(rows), current(), None
    if here is None:
        primitives = _ALONE
        batch = Batch(rows, jnp.ones(count, jnp.float32), jnp.arange(count, dtype=jnp.int32))
    elif here.own is None:
        raise LossError(
            f"rx.{name} was called in a loss, which sees some rows of a batch; it sums over all of "
            "them in a step: differentiate in a loss by jax.grad, and return one value a row"
        )
    else:
        (primitives, index), seen = here.own, here.mask.shape[0]
        step = here.view.step
        if count != seen:
            raise LossError(
                f"rx.{name} was given {count} rows, and the step sees {seen}: give it arrays with "
                "one entry for each row of the batch, [rows, k, ...] for k of each"
            )
        batch = Batch(rows, here.mask, index)
    state = TrainState(step, params=params, opt_state=(), extras=extras, seed=())
    return primitives, state, batch


@jax.jit
def sums_of_all_replicas(found: PyTree) -> PyTree:
    """Return `found`, alike on all replicas; `replicax.core.rows` finds this by its name."""
    return _constant(found)


@jax.custom_jvp
def _constant(found: PyTree) -> PyTree:
    """`found`, which cannot be differentiated: a replica's derivative is not that of all."""
    return found


@_constant.defjvp
def _refuse(_primals: Any, _tangents: Any) -> Any:
    raise LossError(
        "rx.value_and_grad or rx.mean was differentiated; in a step each sums over all replicas, "
        "which jax.grad does not: give rx.value_and_grad a loss of one value a row"
    )


def _returned(returned: Any, definition: OwnState, before: PyTree) -> tuple[PyTree, Metrics]:
    """The arrays of the state, and the metrics, that a step returned."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        raise StateError(
            f"the step returned a {type(returned).__name__}; it returns a pair of the next state "
            "and a dict of metrics: return state, metrics"
        )
    after, metrics = returned
    for name, value in metrics.items():
        dtype, shape = jnp.result_type(value), jnp.shape(value)
        if shape or not jnp.issubdtype(dtype, jnp.floating):
            raise StateError(
                f"the step returned the metric {name!r} as {dtype}{list(shape)}; a metric is one "
                "float: take rx.mean of rows, and jnp.float32 of a count"
            )
    if LOSS not in metrics:
        raise StateError(
            f"the step returned the metrics {', '.join(metrics) or 'none'}; the one named 'loss' "
            "is watched for NaN and spikes: name one so"
        )
    params = definition.arrays(after, before)
    return params, {name: to_sum(jnp.asarray(value)) for name, value in metrics.items()}


def _went_wrong(before: PyTree, after: PyTree) -> list[jax.Array]:
    """The floats of the next state, 0 where those before were not finite: what a guard looks at."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return [jnp.where(jnp.isfinite(b), a, 0) for b, a in pairs if is_trainable(a)]

"""The summing primitive in a step of the user's: `rx.value_and_grad` and `rx.mean`."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.custom.known_gradient import FORWARD, of_known_gradient, sums_of_all_replicas
from replicax.core.data.batch import Batch, ExtraRows, Replicated, mask_and_count
from replicax.core.data.merged import Merged
from replicax.core.data.rows import opened
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import Precision
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import CallContext
from replicax.core.models.split import split_model
from replicax.core.models.stateful import Stateful
from replicax.core.step.accumulate import Sequential
from replicax.core.step.base import StepSums, no_reduction
from replicax.core.step.loss import Weighted, weighted_sum
from replicax.core.step.loss_context import LossContext, current
from replicax.core.step.objective import LossFunction, Objective
from replicax.core.step.update import Summing, mean_gradient
from replicax.errors import ConfigError, LossError
from replicax.text.arguments import answered, typed


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

    def see_merged(self, name: str, merged: Merged) -> None:
        """Called with a metric of the step that is no mean."""

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


_NO_BATCH = object()
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
        entry for each row of the step's batch, or an `rx.ExtraRows`, and without a key the loss is
        called as in evaluation. `means` are float32 scalars, `"loss"` and the metrics, equal on
        all replicas; the gradient, that of the mean loss, has
        the model's structure, with None for leaves that are not trainable. An NNX model keeps its
        writes, and its gradient has the structure of `nnx.state(model, nnx.Param)`. For an
        `rx.Stateful` it is `(means, gradient of its model, state)`, with the state that the loss
        wrote, and for a Linen module with more collections than params these. `means["loss"]` may
        be differentiated once by `model` in reverse mode, as a line search does; no other result
        may be. With `rows`, the last result is a dict of the values `[rows, ...]` behind `"loss"`
        and the metrics that have rows, and of each `rx.ByRow` among them: those of the rows that
        the step sees, not differentiated. Of an `rx.ExtraRows` it is one of that dict.

    Raises:
        LossError: the loss violates its contract, or another result is differentiated.
    """

    def means_and_gradient(
        model: Any, batch: PyTree = _NO_BATCH, key: jax.Array | None = None
    ) -> tuple[Any, ...]:
        if batch is _NO_BATCH:
            raise ConfigError(
                "rx.value_and_grad(loss) was called without a batch, over whose rows it takes the "
                "exact means; it is not jax.value_and_grad: write "
                "rx.value_and_grad(loss)(model, batch, key), or use JAX's"
            )
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
        try:
            means, gradient, after = of_known_gradient(given, *results)
        except TypeError as error:  # raised by JAX outside of jit; `examiner` finds it in a trace
            raise LossError(FORWARD) from error
        found = means, definition.as_model(gradient), *definition.written(model, after)
        if not rows:
            return found
        of_rows = jax.lax.stop_gradient(total.rows)
        if isinstance(batch, ExtraRows):
            return *found, batch.map(lambda _: of_rows)
        return *found, of_rows

    return means_and_gradient


@answered
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
            `rx.Weighted` of floats; or an `rx.ExtraRows` of these.

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


def _seen(
    name: str, rows: PyTree, params: PyTree, extras: PyTree
) -> tuple[Primitives, TrainState, Batch]:
    """Return the active primitives, and the parameters and rows that they sum over."""
    if isinstance(rows, Replicated):
        raise LossError(
            f"rx.{name} was given an rx.Replicated, which has no rows: mark rows of another number "
            "than those of the batch as rx.ExtraRows"
        )
    of_set = isinstance(rows, ExtraRows)
    count, here, step = opened(rows.value if of_set else rows).count, current(), None
    if here is None:
        primitives, rows = _ALONE, rows.value if of_set else rows
        mask, every = map(jnp.asarray, mask_and_count(np.arange(count), count))
        batch = Batch(rows, mask, jnp.arange(count, dtype=jnp.int32), count=every)
    elif here.primitives is None:
        raise LossError(
            f"rx.{name} was called in a loss, which sees only some rows of a batch; it sums over "
            "all rows in a step: use jax.grad inside a loss, and return one value per row"
        )
    else:
        (primitives, whole), seen = here.primitives, here.mask.shape[0]
        step = here.context.step
        if of_set and (rows.rows is None or count != rows.rows.size):
            raise LossError(
                f"rx.{name} was given an rx.ExtraRows of {count} rows that is none of the batch: "
                "use batch[...].map(function), which keeps its rows"
            )
        if not of_set and count != seen:
            raise LossError(
                f"rx.{name} was given {count} rows, and the step sees {seen}: pass arrays with "
                "one entry for each row of the batch, [rows, k, ...] for k entries per row, or an "
                "rx.ExtraRows of the batch"
            )
        batch = rows.rows if of_set else dataclasses.replace(whole, data=rows)
    state = TrainState(step, params=params, opt_state=(), extras=extras, seed=())
    return primitives, state, batch

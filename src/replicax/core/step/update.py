"""The mathematics of one training step: sums from one replica's view, one update of the total."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

from replicax.core.data.batch import Batch
from replicax.core.data.merged import Merged, merged_in_order
from replicax.core.ground.leaves import PyTree, in_one_call
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.models.definition import CallContext
from replicax.core.placement.mesh import Axis
from replicax.core.step.base import (
    Accumulator,
    Apply,
    MappedSums,
    ReduceReplicas,
    StepResult,
    StepSums,
    SumsFunction,
)
from replicax.core.step.loss import LOSS, rows_counted
from replicax.core.step.objective import Objective, only_read, with_zeros
from replicax.core.step.optimizer import Updater


def update(state: TrainState, batch: Batch, *, sums: MappedSums, apply: Apply) -> StepResult:
    """Run one step: sums over the global batch, the mean gradient, one optimizer update.

    `sums` is `step_sums`, mapped onto the mesh. `apply` computes the next state and its own metrics
    from the total: `apply_gradient`, or a wrapper. In every mode it sees global arrays, split
    according to the layout.
    """
    total, extras, reduction_state = sums(state, batch)
    with jax.named_scope("update"):
        state, extra_metrics = apply(state, total, extras, reduction_state)
    return state, {**total.means(), **extra_metrics}, total.rows


def step_sums(
    state: TrainState,
    batch: Batch,
    axis: Axis | None,
    *,
    objective: Objective,
    accumulator: Accumulator,
    reduce: ReduceReplicas,
) -> tuple[StepSums, PyTree, PyTree]:
    """Return the sums of a step: local sums, then one reduction.

    Returns the total, and the model's other arrays and the reduction's state after the step.
    `batch` has this replica's rows, or all rows if there is no `axis`.
    """
    summing = Summing(accumulator, reduce, axis)
    return summing(objective.step_sums, state, batch, step_key(state))


@dataclasses.dataclass(frozen=True)
class Summing:
    """The summing primitive: sums over the rows of a replica, then one reduction."""

    accumulator: Accumulator
    """Rows -> sums, micro-batch by micro-batch."""
    reduce: ReduceReplicas
    """Sums of each replica -> sums over all."""
    axis: Axis | None
    """The replica axis, or None if the batch is the global one."""

    def __call__(
        self, function: SumsFunction, state: TrainState, batch: Batch, key: jax.Array | None
    ) -> tuple[StepSums, PyTree, PyTree]:
        """Return the sums of `function` over the global batch, and the model's other arrays and the
        reduction's state after it.
        """
        with jax.named_scope("gradient"):
            sums, extras = self.accumulator(function, state, batch.whole(), key, self.axis)
        with jax.named_scope("reduction"):
            total, reduction_state = self.reduce(
                dataclasses.replace(sums, rows={}), state.reduction, self.axis
            )  # the only communication, but for metrics that are no means
            rows, merged = self.of_all_rows(sums.rows)
        total = dataclasses.replace(total, rows=rows, merged=sums.merged | merged)
        return total, extras, reduction_state

    @property
    def gather(self) -> Callable[[list[jax.Array]], list[jax.Array]] | None:
        """Gathers the rows of all replicas, as in `CallContext`; None if they are all here."""
        if self.accumulator.gather is None and self.axis is not None:
            return in_one_call(partial(jax.lax.all_gather, axis_name=self.axis, tiled=True))
        return self.accumulator.gather

    def of_all_rows(self, rows: dict[str, PyTree]) -> tuple[dict[str, PyTree], dict[str, Merged]]:
        """Return what has rows, and metrics that are no means, merged over all replicas."""
        gather = self.gather
        others, merged = dict(rows), dict[str, Merged]()
        for name, value in rows.items():
            if isinstance(value, Merged):
                own = merged_in_order(others.pop(name))  # of micro-batches
                leaves, structure = jax.tree.flatten(own)
                if gather is not None:
                    leaves = [each for leaf in leaves for each in gather([leaf])]
                    own = merged_in_order(jax.tree.unflatten(structure, leaves))
                merged[name] = own
        return others, merged


def apply_gradient(
    state: TrainState, total: StepSums, extras: PyTree, reduction_state: PyTree, *, updater: Updater
) -> tuple[TrainState, Metrics]:
    """Return the state after an optimizer update with the gradient of the global mean loss.

    In a batch whose total weight is 0, the gradient is 0 and the loss NaN.
    """
    gradient = mean_gradient(total, state.params, updater.read)
    value = {"value": total.weighted[LOSS].mean()} if updater.takes_value else {}
    updates, opt_state = updater.optimizer.update(gradient, state.opt_state, state.params, **value)
    after = dataclasses.replace(
        state,
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        extras=extras,
        reduction=reduction_state,
    )
    return after, {}


def mean_gradient(total: StepSums, params: PyTree, read: tuple[bool, ...] | None = None) -> PyTree:
    """Return the gradient of the global mean loss, by params; 0 if the total weight is 0."""
    # If the weight is 0, so is the sum. Selecting between two states would cost 10% of an update.
    divisor = total.divisor
    # In the parameter's dtype, as `jax.grad` returns it, so that moments keep their dtype.
    mean = jax.tree.map(
        lambda leaf, param: (leaf / divisor).astype(param.dtype),
        total.gradient,
        only_read(params, read),
    )
    return with_zeros(mean, params, read)


def score(
    state: TrainState,
    batch: Batch,
    axis: Axis | None,
    *,
    objective: Objective,
    accumulator: Accumulator,
    reduce: ReduceReplicas,
) -> dict[str, Any]:
    """Return the sums of loss and metrics over the global batch, the model in evaluation mode.

    A metric that is no mean is a `Merged`; `"rows"` counts the real rows, see `loss.rows_counted`.
    """

    def part(
        params: PyTree, extras: PyTree, rows: Batch, context: CallContext
    ) -> tuple[StepSums, PyTree]:
        found, extras = objective.score_sums(params, extras, rows, context)
        sums = {**found.weighted, "rows": rows_counted(rows.mask)}
        return dataclasses.replace(found, weighted=sums), extras

    total, _, _ = Summing(accumulator, reduce, axis)(part, state, batch, None)
    return total.weighted | total.merged


def step_key(state: TrainState) -> jax.Array:
    """Return the random key of a step, derived from seed and step."""
    return jax.random.fold_in(jax.random.key(state.seed), state.step)

"""The reference of a custom step: the step itself, in plain JAX, on the real rows of a batch.

`rx.value_and_grad` is there `jax.grad` of the mean loss of all rows, as `plain.py` has it: the step
sees one device, no padding, and no micro-batch, so that nothing is left to be summed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.data.merged import Merged
from replicax.core.data.per_row import RowsOfState, map_rows_of_state, rows_of_state
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import CallContext
from replicax.core.step.accumulate import Sequential
from replicax.core.step.base import StepResult, StepSums, no_reduction
from replicax.core.step.loss import LOSS, WeightedSum, rows_of
from replicax.core.step.loss_context import LossContext
from replicax.core.step.objective import Objective
from replicax.verify.plain import PlainLoss, other_metrics, plain_means


class PlainCustomStep:
    """A custom step on one device, called with a batch of which it gets the real rows."""

    def __init__(self, dp: DataParallel, model: Any) -> None:
        self._device = dp.mesh.devices.flat[0]
        whole = {"accumulator": Sequential(), "reduce": no_reduction, "examiner": _Plain()}
        step = dp.program(model).custom_step
        self._step = jax.jit(lambda state, batch: step(state, batch, None, **whole))

    def __call__(self, state: TrainState, batch: Batch) -> StepResult:
        """Return the state after the step, its metrics, and its results by row."""
        real = _real_rows(batch)
        after, metrics, rows = self._step(*self._placed(state, batch, real))
        params = _all_rows(state.params, after.params, real)
        # Rows of a part of the batch have no counterpart among those of the whole.
        rows = rows if len(real) == batch.size else {}
        return dataclasses.replace(after, params=params), metrics, rows

    def lower(self, state: TrainState, batch: Batch) -> jax.stages.Lowered:
        """Return the program of the step on a batch, to be analysed."""
        real = _real_rows(batch)
        return self._step.lower(*self._placed(state, batch, real))

    def _placed(self, state: TrainState, batch: Batch, real: np.ndarray) -> Any:
        rows = jax.tree.map(lambda leaf: leaf[real], batch)
        own = map_rows_of_state(
            lambda each: RowsOfState(jax.tree.map(lambda leaf: leaf[real], each.value), len(real)),
            state.params,
        )
        given = dataclasses.replace(state, params=own), rows.apart()
        return jax.device_put(given, self._device)


class _Plain:
    """Computes the means of a loss and their gradient in place of the sums of a step."""

    def step_sums(
        self,
        objective: Objective,
        params: PyTree,
        extras: PyTree,
        rows: Batch,
        context: CallContext,
    ) -> tuple[StepSums, PyTree]:
        """Return means, each with weight 1, and the gradient of the mean loss."""
        plain = PlainLoss(objective.definition, objective.loss, objective.precision)

        def mean(params: PyTree) -> tuple[jax.Array, Any]:
            returned, after = plain.returned(params, extras, rows, context)
            means = plain_means(returned, rows.mask)
            by_row = rows_of(returned, rows.size, every=objective.every_row)
            others = other_metrics(returned, rows.mask)
            merged = {name: each for name, each in others.items() if isinstance(each, Merged)}
            return means[LOSS], (means, by_row | merged, after)

        gradient, (means, by_row, after) = jax.grad(mean, has_aux=True)(params)
        one = jnp.ones((), jnp.float32)
        weighted = {name: WeightedSum(value, one) for name, value in means.items()}
        return StepSums(gradient, weighted, by_row), after

    def see_merged(self, name: str, merged: Merged) -> None:
        """Ignore a metric."""

    def see(self, name: str, value: Any) -> None:
        """Ignore rows."""

    def step(self, here: LossContext) -> None:
        """Ignore that the step has returned."""


def _real_rows(batch: Batch) -> np.ndarray:
    """Return which rows are no padding, or all if none are."""
    real = np.flatnonzero(np.asarray(batch.mask))
    return real if len(real) else np.arange(batch.size)


def _all_rows(before: PyTree, after: PyTree, real: np.ndarray) -> PyTree:
    """Return the state after a step on the `real` rows, with the other rows as they were."""
    old = iter(rows_of_state(before))

    def put(whole: Any, some: Any) -> np.ndarray:
        filled = np.array(whole)
        filled[real] = some
        return filled

    def filled(rows: RowsOfState) -> RowsOfState:
        was = next(old)
        return RowsOfState(jax.tree.map(put, was.value, rows.value), was.real)

    return map_rows_of_state(filled, after)

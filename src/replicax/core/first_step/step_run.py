"""A custom step, run to be examined: with which of its inputs as rows."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from replicax.core.custom.custom_step import keep
from replicax.core.data.batch import Batch
from replicax.core.data.merged import Merged
from replicax.core.data.per_row import RowsOfState, is_rows_of_state, map_rows_of_state
from replicax.core.first_step.examiner import RowExaminer
from replicax.core.ground.leaves import PyTree, divided, merged
from replicax.core.ground.train_state import TrainState
from replicax.core.step.accumulate import Sequential
from replicax.core.step.base import no_reduction
from replicax.core.step.loss import is_unbound_axis
from replicax.errors import LossError


def each_set(state: TrainState, batch: Batch) -> Iterator[tuple[TrainState, Batch]]:
    """Yield the batch, and then each of its sets, to be examined while all else is constant.

    All else of a batch is then one of its shared values.
    """
    yield _with_rows_of_state(state, batch)
    for place, rows in enumerate(batch.sets):
        others = (*batch.sets[:place], *batch.sets[place + 1 :])
        yield state, dataclasses.replace(rows, shared=(dataclasses.replace(batch, sets=others),))


def _with_set_back(batch: Batch) -> Batch:
    """Return the batch of which `batch` is a set, as yielded by `each_set`."""
    [whole], place = batch.shared, batch.number - 1
    sets = list(whole.sets)
    sets.insert(place, dataclasses.replace(batch, shared=()))
    found: Batch = dataclasses.replace(whole, sets=tuple(sets))
    return found


def _with_rows_of_state(state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
    """Return a state and a batch to examine: rows of the state are rows of the batch."""
    leaves = jax.tree.leaves(state.params, is_leaf=is_rows_of_state)
    if not any(flags := list(map(is_rows_of_state, leaves))):
        return state, batch
    rows, others = divided(leaves, flags)
    values = [each.value for each in rows]
    return dataclasses.replace(state, params=others), dataclasses.replace(
        batch, data=(batch.data, values)
    )


def _with_rows_back(params: PyTree, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
    """Undo `_with_rows_of_state` for a state whose parameters are like `params`."""
    leaves, structure = jax.tree.flatten(params, is_leaf=is_rows_of_state)
    if not any(flags := list(map(is_rows_of_state, leaves))):
        return state, batch
    data, values = batch.data
    rows = [RowsOfState(value, real=batch.size) for value in values]
    whole = jax.tree.unflatten(structure, merged(rows, state.params, flags))
    return dataclasses.replace(state, params=whole), dataclasses.replace(batch, data=data)


def run_step(
    custom_step: Callable[..., Any],
    params: PyTree,
    state: TrainState,
    batch: Batch,
    examiner: RowExaminer,
) -> tuple[PyTree, None]:
    """Run a custom step to examine it: the state and the metrics must not depend on rows."""
    if batch.number:
        batch = _with_set_back(batch)
    else:
        state, batch = _with_rows_back(params, state, batch)
    try:
        after, metrics, _ = custom_step(
            *(state, batch, None),
            accumulator=Sequential(gather=examiner.gather, row_numbers=lambda _: batch.index),
            reduce=no_reduction,
            apply=keep,
            examiner=examiner,
        )
    except NameError as error:
        if not is_unbound_axis(error):
            raise
        raise LossError(
            "the step reduces over the replicas itself (psum or pmean over an axis), but must "
            "also run without one: use rx.mean, rx.value_and_grad or rx.gather"
        ) from error
    metrics = {name: value for name, value in metrics.items() if not isinstance(value, Merged)}
    return {"state": map_rows_of_state(lambda _: (), after.params), "metrics": metrics}, None

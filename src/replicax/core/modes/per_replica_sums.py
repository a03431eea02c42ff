"""Compute the sums of a global-batch step per replica if the result is the same.

For the global view on several GPUs, XLA reduces each gradient at the product that computes it: in
bfloat16 if the product is, and under a scan once per layer, while computation waits. Per replica,
one reduction covers all gradients, in float32, and overlaps with the backward pass.
"""

import contextlib
import dataclasses
import itertools
import math
from typing import Any

import jax

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.traced_for import cuda_capability
from replicax.core.ground.train_state import TrainState
from replicax.core.modes.mapping import of_each_replica, shard_map
from replicax.core.modes.step_builder import StepSpec, jitted, mapped
from replicax.core.placement.mesh import is_data_only
from replicax.core.step.base import CompiledFunction, MappedSums, StepSums
from replicax.core.step.objective import Objective
from replicax.core.step.update import step_key


def build_where_rows_are_apart(parts: StepSpec) -> CompiledFunction[Any]:
    """Return the program of `parts` in the global view, with sums by replica where it can."""
    whole = mapped(parts)
    by_replica = parts.mesh.size > 1 and is_data_only(parts.mesh) and parts.layout.is_whole
    if parts.apply is None or not by_replica:
        return jitted(parts, whole)
    reduce = of_each_replica(parts.reduction)
    apart = mapped(dataclasses.replace(parts, wrap=shard_map, reduce=reduce))
    return jitted(parts, where_rows_are_apart(parts.objective, apart, whole))


def where_rows_are_apart(
    objective: Objective, by_replica: MappedSums, otherwise: MappedSums
) -> MappedSums:
    """Return sums traced as `by_replica` on GPUs if each row's loss is independent of other rows.

    `by_replica` computes the sums of a step with each replica seeing its own rows; `otherwise`
    computes them from the whole batch at once.
    """

    def sums(state: TrainState, batch: Batch) -> tuple[StepSums, PyTree, PyTree]:
        if cuda_capability() is not None:
            shapes = jax.eval_shape(lambda *given: given, state, batch)
            if _are_apart(objective, *shapes):
                with contextlib.suppress(Exception):  # a loss may hard-code the global batch's rows
                    return by_replica(state, batch)
        return otherwise(state, batch)

    return sums


def _are_apart(objective: Objective, state: TrainState, batch: Batch) -> bool:
    from replicax.core.first_step.examiner import of_loss  # only on GPUs
    from replicax.core.first_step.loss_check import LossExamination

    if jax.tree.leaves(state.extras):
        return False
    for rows in (batch, _of_other_rows(batch)):
        with contextlib.suppress(Exception):  # the user's loss, on an unfamiliar number of rows
            examination = LossExamination(of_loss(objective, step_key), state, rows)
            if examination.is_apart and not examination.draws:  # a replica's draws are its own
                return True
    return False


def _of_other_rows(batch: Batch) -> Batch:
    """Return the shapes of a batch with a few more rows, not a multiple of an attention block."""
    odd = next(each for each in itertools.count(batch.size + 1) if math.gcd(each, 2 * 3 * 5) == 1)
    return batch.map_rows(lambda leaf: jax.ShapeDtypeStruct((odd, *leaf.shape[1:]), leaf.dtype))

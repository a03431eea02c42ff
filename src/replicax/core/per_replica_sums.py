"""Compute the sums of a global-batch step per replica if the result is the same.

For the global view on several GPUs, XLA reduces each gradient at the product that computes it: in
bfloat16 if the product is, and under a scan once per layer, while computation waits. Per replica,
one reduction covers all gradients, in float32, and overlaps with the backward pass.
"""

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax

from replicax.core.data.batch import Batch
from replicax.core.first_step.examiner import of_loss
from replicax.core.first_step.loss_check import LossExamination
from replicax.core.ground.traced_for import cuda_capability
from replicax.core.ground.train_state import TrainState
from replicax.core.step.objective import Objective
from replicax.core.step.update import step_key

Sums = Callable[[TrainState, Batch], Any]


def where_rows_are_apart(objective: Objective, by_replica: Sums, otherwise: Sums) -> Sums:
    """Return sums traced as `by_replica` on GPUs if each row's loss is independent of other rows.

    `by_replica` computes the sums of a step with each replica seeing its own rows; `otherwise`
    computes them from the whole batch at once.
    """

    def sums(state: TrainState, batch: Batch) -> Any:
        if cuda_capability() is not None:
            shapes = jax.eval_shape(lambda *given: given, state, batch)
            if _are_apart(objective, *shapes) and _can(by_replica, *shapes):
                return by_replica(state, batch)
        return otherwise(state, batch)

    return sums


def _are_apart(objective: Objective, state: TrainState, batch: Batch) -> bool:
    if jax.tree.leaves(state.extras):
        return False
    for rows in (batch, _of_other_rows(batch)):
        with contextlib.suppress(Exception):  # the user's loss, on an unfamiliar number of rows
            look = LossExamination(of_loss(objective, step_key), state, rows)
            if look.takes_padding and not look.draws:  # a replica's draws are its own
                return True
    return False


def _of_other_rows(batch: Batch) -> Batch:
    """Return the shapes of a batch with a few more rows, not a multiple of an attention block."""
    odd = next(each for each in itertools.count(batch.size + 1) if math.gcd(each, 2 * 3 * 5) == 1)
    return batch.map_rows(lambda leaf: jax.ShapeDtypeStruct((odd, *leaf.shape[1:]), leaf.dtype))


def _can(sums: Sums, state: TrainState, batch: Batch) -> bool:
    """Whether the loss accepts fewer rows than the global batch: it may hard-code that number."""
    try:
        jax.eval_shape(sums, state, batch)
    except Exception:  # the user's loss
        return False
    return True

"""The sums of a step that sees the whole batch, replica by replica where they are the same.

What XLA makes of the global view on several GPUs adds up gradients where their products are: in
bfloat16 if these are, and under a scan once for each layer, while computation waits. Replica by
replica there is one reduction of everything, in float32, beside the backward pass.
"""

import contextlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.batch import Batch
from replicax.core.look import Look
from replicax.core.models.definition import View
from replicax.core.objective import Objective
from replicax.core.traced_for import cuda_capability
from replicax.core.update import TrainState

Sums = Callable[[TrainState, Batch], Any]


def where_rows_are_apart(objective: Objective, by_replica: Sums, otherwise: Sums) -> Sums:
    """Return sums that are traced as `by_replica` on GPUs, if the loss of each row needs no other.

    `by_replica` are the sums of a step, each replica seeing its own rows; `otherwise` the same of
    the whole batch at once.
    """

    def sums(state: TrainState, batch: Batch) -> Any:
        if cuda_capability() is not None:
            shapes = jax.eval_shape(lambda *given: given, state, batch)
            if _are_apart(objective, *shapes) and _can(by_replica, *shapes):
                return by_replica(state, batch)
        return otherwise(state, batch)

    return sums


def _are_apart(objective: Objective, state: TrainState, batch: Batch) -> bool:
    if jax.tree.leaves(state.extras) or _draws(objective, state, batch):
        return False
    for rows in (batch, _of_other_rows(batch)):
        with contextlib.suppress(Exception):  # the user's loss, on a number of rows it has not seen
            look = Look(objective, state, rows, divided=True, compute=False)
            if not (look.rows_meet or look.unsure or look.gathers or look.scalars):
                return True
    return False


def _of_other_rows(batch: Batch) -> Batch:
    """Return the shapes of a batch of a few more rows, whose number is no block of an attention."""
    odd = next(each for each in itertools.count(batch.size + 1) if math.gcd(each, 2 * 3 * 5) == 1)
    return batch.map_rows(lambda leaf: jax.ShapeDtypeStruct((odd, *leaf.shape[1:]), leaf.dtype))


def _draws(objective: Objective, state: TrainState, batch: Batch) -> bool:
    """Whether the loss reads its key: each replica draws other numbers than all together do."""

    def values(key: jax.Array, params: Any, batch: Batch) -> Any:
        return objective.loss_sums(params, state.extras, batch, View(key, step=jnp.int32(0)))

    key = jax.eval_shape(lambda: jax.random.key(0))
    jaxpr = jax.make_jaxpr(values)(key, state.params, batch).jaxpr
    used = {id(atom) for eqn in jaxpr.eqns for atom in eqn.invars}
    return id(jaxpr.invars[0]) in used


def _can(sums: Sums, state: TrainState, batch: Batch) -> bool:
    """Whether the loss takes fewer rows than the whole batch has: it may name that number."""
    try:
        jax.eval_shape(sums, state, batch)
    except Exception:  # the user's loss
        return False
    return True

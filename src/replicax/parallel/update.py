"""The mathematics of a step, written once, as pure functions of one replica's view."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from replicax.data.batch import Batch
from replicax.parallel.gradients import Objective, Sums, replica_sums
from replicax.parallel.loss import LOSS, Sum
from replicax.parallel.model import PyTree
from replicax.parallel.reduction import reduce


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "extras", "seed"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes, and the seed that it draws from: a plain pytree.

    The same tree with shapes or shardings for leaves describes a state.
    """

    step: Any
    """int32 scalar: updates done."""
    params: PyTree
    """Trainable arrays."""
    opt_state: PyTree
    """The optimizer's state."""
    extras: PyTree
    """The model's other arrays: BatchNorm's statistics, say."""
    seed: Any
    """uint32 scalar: all random numbers of the run follow from it and the step."""


Metrics = dict[str, jax.Array]


def create(
    params: PyTree, extras: PyTree, seed: jax.Array, optimizer: optax.GradientTransformation
) -> TrainState:
    """The state before the first step."""
    return TrainState(jnp.int32(0), params, optimizer.init(params), extras, jnp.uint32(seed))


def update(
    state: TrainState,
    batch: Batch,
    axis: str | None,
    *,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    micro_batches: int,
) -> tuple[TrainState, Metrics]:
    """One step: local sums, one reduction, one division, one optimizer update.

    A batch in which nothing has any weight has gradient 0, and its loss is NaN.

    Args:
        state: the state before the step.
        batch: this replica's rows.
        axis: the name of the replica axis, or None where the batch is the whole one.
        objective: the loss on the model.
        optimizer: turns the gradient of the global mean loss into an update.
        micro_batches: parts the rows are computed in, one after the other.
    """
    with jax.named_scope("gradient"):
        local, extras = replica_sums(
            objective,
            state.params,
            state.extras,
            batch,
            step_key(state, axis),
            micro_batches=micro_batches,
            axis=axis,
        )
    with jax.named_scope("reduction"):
        total = reduce(local, axis)
    with jax.named_scope("update"):
        return _apply(state, total, extras, optimizer)


def _apply(
    state: TrainState, total: Sums, extras: PyTree, optimizer: optax.GradientTransformation
) -> tuple[TrainState, Metrics]:
    """The state and the metrics after the global sums."""
    loss = total.means[LOSS]
    # Where there is no weight the sum is 0. Choosing between two states instead would cost a tenth
    # of a step that is mostly optimizer.
    weight = jnp.where(loss.weight > 0, loss.weight, 1)
    gradient = jax.tree.map(
        lambda leaf, param: (leaf / weight).astype(jnp.promote_types(leaf.dtype, param.dtype)),
        total.gradient,
        state.params,
    )
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        gradient, state.opt_state, state.params, value=loss.mean()
    )
    params = optax.apply_updates(state.params, updates)
    metrics = {name: value.mean() for name, value in total.means.items()}
    return TrainState(state.step + 1, params, opt_state, extras, state.seed), metrics


def score(
    state: TrainState, batch: Batch, axis: str | None, *, objective: Objective
) -> dict[str, Sum]:
    """The sums of loss and metrics over the global batch, with the model in evaluation mode.

    `"rows"` counts the real rows: its total, with weight 1.
    """
    means, _ = objective.means(state.params, state.extras, batch, None, axis)
    rows = jnp.sum(batch.mask)
    totals: dict[str, Sum] = reduce({**means, "rows": Sum(rows, jnp.zeros_like(rows))}, axis)
    return totals


def step_key(state: TrainState, axis: str | None) -> jax.Array:
    """The key of a step: a function of seed and step, and of the replica where each has its own."""
    key = jax.random.fold_in(jax.random.key(state.seed), state.step)
    return key if axis is None else jax.random.fold_in(key, lax.axis_index(axis))

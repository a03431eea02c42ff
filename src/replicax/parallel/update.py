"""The mathematics of a step, written once, as pure functions of one replica's view."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from replicax.data.batch import Batch
from replicax.parallel.gradients import Objective, Sums
from replicax.parallel.loss import LOSS, Sum
from replicax.parallel.model import PyTree
from replicax.parallel.summation import Summation


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

NOT_FINITE = "not_finite"
"""The metric of a guarded step: whether its loss, or what is looked at of its gradient, is not."""

_LARGEST_UPDATE = 1e19
"""A larger one would make all replicas equal by drowning what they differ in."""


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
    summation: Summation,
    guard: bool = False,
) -> tuple[TrainState, Metrics]:
    """One step: local sums, one reduction, one division, one optimizer update.

    A batch in which nothing has any weight has gradient 0, and its loss is NaN.

    Args:
        state: the state before the step.
        batch: this replica's rows.
        axis: the name of the replica axis, or None where the batch is the whole one.
        objective: the loss on the model.
        optimizer: turns the gradient of the global mean loss into an update.
        summation: how the rows are summed.
        guard: whether an update that is not finite leaves its parameter as it was, and the metrics
            have `NOT_FINITE`. See `replicax.parallel.guarded`.
    """
    total, extras = summation(
        objective.sums, state.params, state.extras, batch, step_key(state), axis
    )

    def apply(carry: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
        state, weight = carry
        return _apply(state, total, weight, optimizer), weight + 1

    with jax.named_scope("update"):
        once = 1 + (state.step < 0).astype(jnp.int32)
        before = dataclasses.replace(state, extras=extras)
        state, _ = summation.finish(apply, (before, total.means[LOSS].weight), once)
        if guard:
            params = jax.tree.map(_new_or_old, state.params, before.params)
            state = dataclasses.replace(state, params=params)
    metrics = {name: value.mean() for name, value in total.means.items()}
    return state, {**metrics, NOT_FINITE: ~_seems_finite(total)} if guard else metrics


def _seems_finite(total: Sums) -> jax.Array:
    """Whether the loss and the first element of each gradient are.

    To look at all of them would cost a hundredth of a step, and what is not finite seldom is alone.
    """
    firsts = [leaf.ravel()[:1] for leaf in jax.tree.leaves(total.gradient)]
    looked_at = [total.means[LOSS].total, *(jnp.sum(jnp.abs(first)) for first in firsts)]
    return jnp.isfinite(jnp.stack([each.astype(jnp.float32) for each in looked_at])).all()


def _apply(
    state: TrainState,
    total: Sums,
    weight: jax.Array,
    optimizer: optax.GradientTransformation,
) -> TrainState:
    """The state after the optimizer has seen the gradient of the global mean loss.

    Args:
        state: the one before, with the extras after.
        total: sums over the global batch.
        weight: of its loss.
        optimizer: see `update`.
    """
    # Where there is no weight the sum is 0. Choosing between two states instead would cost a tenth
    # of a step that is mostly optimizer.
    divisor = jnp.where(weight > 0, weight, 1)
    gradient = jax.tree.map(
        lambda leaf, param: (leaf / divisor).astype(jnp.promote_types(leaf.dtype, param.dtype)),
        total.gradient,
        state.params,
    )
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        gradient, state.opt_state, state.params, value=total.means[LOSS].total / weight
    )
    params = optax.apply_updates(state.params, updates)
    return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state)


def _new_or_old(new: jax.Array, old: jax.Array) -> jax.Array:
    """`new`, and where the update was not finite `old`."""
    return jnp.where(jnp.abs(new - old) < _LARGEST_UPDATE, new, old)


def score(
    state: TrainState,
    batch: Batch,
    axis: str | None,
    *,
    objective: Objective,
    summation: Summation,
) -> dict[str, Sum]:
    """The sums of loss and metrics over the global batch, with the model in evaluation mode.

    `"rows"` counts the real rows: its total, with weight 1.
    """

    def means(params: PyTree, extras: PyTree, rows: Batch, *view: Any) -> Any:
        found, extras = objective.means(params, extras, rows, *view)
        count = jnp.sum(rows.mask)
        return {**found, "rows": Sum(count, jnp.zeros_like(count))}, extras

    totals: dict[str, Sum]
    totals, _ = summation(means, state.params, state.extras, batch, None, axis)
    return totals


def step_key(state: TrainState) -> jax.Array:
    """The key of a step: a function of seed and step."""
    return jax.random.fold_in(jax.random.key(state.seed), state.step)

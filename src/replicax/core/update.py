"""The mathematics of a step, written once, as pure functions of one replica's view."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from replicax.core.accumulate import Summation
from replicax.core.batch import Batch
from replicax.core.loss import LOSS, Sum
from replicax.core.models.split import PyTree
from replicax.core.objective import Objective, Sums


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "opt_state", "extras", "seed", "losses"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes, and the seed that it draws from: a plain pytree.

    The same tree with shapes or shardings for leaves describes a state.
    """

    step: Any
    """int32 scalar: steps done. A bad one, whose update was skipped, is counted like any, so that
    keys and data stay in line with it."""
    params: PyTree
    """Trainable arrays."""
    opt_state: PyTree
    """The optimizer's state."""
    extras: PyTree
    """The model's other arrays: BatchNorm's statistics, say."""
    seed: Any
    """uint32 scalar: all random numbers of the run follow from it and the step."""
    losses: Any = ()
    """float32 `[SPIKE_WINDOW]`, where spikes are skipped: the last losses, the newest last, and NaN
    before the first; else empty."""


Metrics = dict[str, jax.Array]

NOT_FINITE = "not_finite"
"""The metric of a guarded step: whether its loss, or something in its gradient, is not finite."""

SPIKE = "spike"
"""The metric of a guarded step whose state has `losses`: whether its loss is far above them."""

SPIKE_WINDOW = 128
"""Losses that one is compared with. This, and `SPIKE_SIGMAS`, are what MaxText and OLMo-core have
(`skip_step_interval` and `skip_step_scaling_factor`; `SkipStepOptimizer`)."""

SPIKE_SIGMAS = 6.0
"""Standard deviations above their mean at which a loss is a spike."""

_LARGEST_GRADIENT = float(np.sqrt(np.finfo(np.float32).max))
"""Adam and norms take its square, which of a larger one is not finite in float32: 1.8e19."""


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
        guard: whether a bad step, one that is not finite or a spike, leaves all but `step` as it
            was, bit for bit; the metrics then have `NOT_FINITE`, and `SPIKE` where the state has
            `losses`. All replicas decide alike, for they look at the sums that all were given.
    """
    total, extras = summation(
        objective.sums, state.params, state.extras, batch, step_key(state), axis
    )
    metrics = {name: value.mean() for name, value in total.means.items()}

    def apply(carry: tuple[TrainState, jax.Array]) -> tuple[TrainState, jax.Array]:
        state, weight = carry
        return _apply(state, total, weight, optimizer), weight + 1

    def finish(state: TrainState, times: jax.Array) -> TrainState:
        with jax.named_scope("update"):
            state, _ = summation.finish(apply, (state, total.means[LOSS].weight), times)
        return state

    once = 1 + (state.step < 0).astype(jnp.int32)
    if not guard:
        return finish(dataclasses.replace(state, extras=extras), once), metrics
    with jax.named_scope("guard"):
        judged, losses = _judge(state, total, summation, once)
        good = ~jnp.stack(list(judged.values())).any()
    # A choice between two states would be slower by up to half of a step that is mostly optimizer.
    # With the branches the other way around, XLA:CPU keeps two more gradients.
    after = lax.cond(
        good,
        lambda state: finish(dataclasses.replace(state, extras=extras), once),
        lambda state: state,
        state,
    )
    after = dataclasses.replace(after, step=state.step + 1, losses=losses)
    return after, {**metrics, **judged}


def _judge(
    state: TrainState, total: Sums, summation: Summation, once: jax.Array
) -> tuple[Metrics, Any]:
    """What may make a step bad, and the losses to compare the next one's with.

    Args:
        state: the one before.
        total: sums over the global batch.
        summation: see `update`.
        once: see `Summation.finish`.
    """
    not_finite = ~_is_finite(total)
    if not jax.tree.leaves(state.losses):
        return {NOT_FINITE: not_finite}, state.losses

    def compare(carry: Any) -> Any:
        losses, total, weight, _ = carry
        loss = (total / weight).astype(jnp.float32)
        # Of a window that is not full, mean and deviation are NaN, and nothing is above that.
        spike = loss > jnp.mean(losses) + SPIKE_SIGMAS * jnp.std(losses, ddof=1)
        pushed = jnp.append(losses[1:], loss)
        enters = jnp.isfinite(loss) & ~spike & ~not_finite
        return jnp.where(enters, pushed, losses), total + 1, weight + 1, spike

    loss = total.means[LOSS]
    carry = (state.losses, loss.total, loss.weight, jnp.bool_(False))
    losses, _, _, spike = summation.finish(compare, carry, once)
    return {NOT_FINITE: not_finite, SPIKE: spike & ~not_finite}, losses


def _is_finite(total: Sums) -> jax.Array:
    """Whether the loss is, and each element of the gradient with its square.

    Those that are not are counted, as a float: unlike that of a norm this sum is 0 or not in any
    order, and unlike a logical one it is taken of a split gradient where its parts are.
    """
    wrong = [
        jnp.sum(jnp.where(jnp.abs(leaf) < _LARGEST_GRADIENT, jnp.float32(0), jnp.float32(1)))
        for leaf in jax.tree.leaves(total.gradient)
    ]
    return (jnp.stack(wrong) == 0).all() & jnp.isfinite(total.means[LOSS].total)


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

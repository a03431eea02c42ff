"""A training step that skips its update where that would do harm."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.accumulate import Apply
from replicax.core.data_parallel import DataParallel
from replicax.core.leaves import shapes_by_path
from replicax.core.loss import LOSS
from replicax.core.models.definition import PyTree
from replicax.core.objective import StepSums
from replicax.core.scaling import unless
from replicax.core.update import Metrics, TrainState
from replicax.errors import ConfigError

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


def guarded(
    dp: DataParallel, state: TrainState, around: tuple[Callable[[Apply], Apply], ...] = ()
) -> DataParallel:
    """Return `dp`, but a bad step leaves all of the state as it was, except that `step` counts on.

    A step is bad where its loss or something in the gradient that the optimizer reads is not finite
    (or so large that its square is not), and, with a state of `with_losses`, where its loss is a
    spike. `step` then gives the metrics `NOT_FINITE` and `SPIKE`, and does not raise for a first
    loss that is not finite: who reads them decides. See `replicax.train.dispatched`.

    That also keeps what an audit looks for: a flipped bit in one replica's weights can make
    everybody's next gradient NaN, and all replicas equal again if it were applied.
    """
    return dp.wrapping(_Around(around), state)


@dataclasses.dataclass(frozen=True)
class _Around:
    """The guard around other wrappers; equal where they are."""

    wraps: tuple[Callable[[Apply], Apply], ...]

    def __call__(self, apply: Apply) -> Apply:
        for wrap in self.wraps:
            apply = wrap(apply)
        return skip_bad_steps(apply)


def with_losses(state: TrainState) -> TrainState:
    """Return `state` with a window of losses, still empty: a guarded step then skips spikes too.

    A spike is a loss that is `SPIKE_SIGMAS` standard deviations above the mean of the last
    `SPIKE_WINDOW` that were none, once there are as many.
    """
    if jax.tree.leaves(state.losses):
        return state
    shape, where = (SPIKE_WINDOW,), state.step.sharding
    losses: object = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
    if not isinstance(state.step, jax.ShapeDtypeStruct):
        losses = jnp.full(shape, jnp.nan, jnp.float32, device=where)
    return dataclasses.replace(state, losses=losses)


def skip_bad_steps(apply: Apply) -> Apply:
    """Return `apply`, but a bad step keeps all of the state, bit for bit, and `step` counts on.

    All replicas decide alike, for they look at the sums that all were given.
    """

    def guarded_apply(
        state: TrainState, total: StepSums, *rest: PyTree
    ) -> tuple[TrainState, Metrics]:
        def update(state: TrainState) -> tuple[TrainState, Metrics]:
            return apply(state, total, *rest)

        _check_alike(state, jax.eval_shape(update, state)[0])
        verdicts, losses = _judge(state.losses, total)
        bad = jnp.stack(list(verdicts.values())).any()
        after, told = unless(bad, update, state)
        after = dataclasses.replace(after, step=state.step + 1, losses=losses)
        return after, {**told, **verdicts}

    return guarded_apply


def _check_alike(state: TrainState, after: TrainState) -> None:
    """Raise `ConfigError` where the state after a step cannot be chosen in place of that before."""
    before, now = shapes_by_path(state), shapes_by_path(after)
    for path in {**before, **now}:
        found, wanted = now.get(path, "not there"), before.get(path, "not there")
        if found != wanted:
            raise ConfigError(
                f"state{path} is {wanted} before a step and {found} after it; a bad step keeps the "
                "state as it was, so both must be alike: cast it in the optimizer's update"
            )


def _judge(losses: Any, total: StepSums) -> tuple[Metrics, Any]:
    """Return what may make a step bad, and the losses to compare the next one's with."""
    not_finite = ~_is_finite(total)
    if not jax.tree.leaves(losses):
        return {NOT_FINITE: not_finite}, losses
    loss = total.weighted[LOSS].mean().astype(jnp.float32)
    # Of a window that is not full, mean and deviation are NaN, and nothing is above that.
    spike = loss > jnp.mean(losses) + SPIKE_SIGMAS * jnp.std(losses, ddof=1)
    enters = jnp.isfinite(loss) & ~spike & ~not_finite
    pushed = jnp.where(enters, jnp.append(losses[1:], loss), losses)
    return {NOT_FINITE: not_finite, SPIKE: spike & ~not_finite}, pushed


def _is_finite(total: StepSums) -> jax.Array:
    """Whether the loss is, and each element of the gradient with its square.

    Those that are not are counted, as a float: unlike that of a norm this sum is 0 or not in any
    order, and unlike a logical one it is taken of a split gradient where its parts are.
    """
    wrong = [
        jnp.sum(jnp.where(jnp.abs(leaf) < _LARGEST_GRADIENT, jnp.float32(0), jnp.float32(1)))
        for leaf in jax.tree.leaves(total.gradient)
    ]
    return (jnp.sum(jnp.stack([jnp.float32(0), *wrong])) == 0) & jnp.isfinite(
        total.weighted[LOSS].total
    )

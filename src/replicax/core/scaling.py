"""Dynamic loss scaling: the gradients of a float16 computation, none too small or too large."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.core.accumulate import Apply, scale_of, zeros_like
from replicax.core.loss import LOSS
from replicax.core.objective import StepSums
from replicax.core.traced_for import cuda_capability
from replicax.core.update import Metrics, TrainState

LARGEST = 2.0**15
"""The scale of the first step, and the largest: float16 ends at 65,504."""
SMALLEST = 2.0**-14
"""With this scale nothing overflows but what is wrong without one: it is then no overflow."""
PATIENCE = 2000
"""Steps without an overflow after which the scale is doubled, as in PyTorch's `GradScaler`."""

_MOST = float(np.finfo(np.float16).max)

LOSS_SCALE = "loss_scale"
"""The metric of a scaled step: the scale that its gradient was computed with."""
OVERFLOWS = "overflows"
"""The metric of a scaled step: how many were skipped for an overflow so far, it among them."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scale:
    """Factor of the loss before it is differentiated, a power of two."""

    value: Any
    """float32 scalar."""
    good: Any
    """int32 scalar: steps without an overflow since it last changed."""
    skipped: Any
    """int32 scalar: steps that were skipped for an overflow."""

    def after(self, overflow: jax.Array) -> "Scale":
        """Return the next scale: half of it after an overflow, twice after `PATIENCE` steps."""
        doubles = ~overflow & (self.good + 1 >= PATIENCE)
        factor = jnp.where(overflow, 0.5, jnp.where(doubles, 2.0, 1.0))
        return Scale(
            jnp.clip(self.value * factor, SMALLEST, LARGEST).astype(jnp.float32),
            jnp.where(overflow | doubles, 0, self.good + 1).astype(jnp.int32),
            self.skipped + overflow.astype(jnp.int32),
        )


def first_scale() -> Scale:
    """Return the scale of the first step."""
    return Scale(jnp.float32(LARGEST), jnp.int32(0), jnp.int32(0))


def unscaled(total: StepSums, state: TrainState) -> StepSums:
    """Return `total` with its gradient divided by the scale of `state`, if that has one."""
    scale = scale_of(state)
    if scale is None:
        return total
    gradient = jax.tree.map(lambda leaf: leaf / scale, total.gradient)  # exact: a power of two
    return dataclasses.replace(total, gradient=gradient)


def overflows(state: TrainState) -> int:
    """Return how many steps were skipped for an overflow."""
    return int(state.scale.skipped) if state.scale else 0


def settled(step: Callable[[TrainState], Any], state: TrainState) -> TrainState:
    """Return the state after the first step that does not overflow; `state` if it has no scale."""
    while state.scale:
        before = overflows(state)
        state, _ = step(state)
        if overflows(state) == before:
            break
    return state


def unscaling(apply: Apply) -> Apply:
    """Return `apply` on the gradient divided by the scale; an overflow skips it, and only counts.

    A loss that is not finite is no overflow, for no scale mends it. All replicas decide alike, for
    they look at the sums that all were given.
    """

    def unscaled_apply(
        state: TrainState, total: StepSums, *rest: Any
    ) -> tuple[TrainState, Metrics]:
        scale: Scale = state.scale
        # Of the sum over all rows, so that it does not matter in how many parts they were summed.
        held = [jnp.all(jnp.abs(leaf) <= _MOST) for leaf in jax.tree.leaves(total.gradient)]
        mends = jnp.isfinite(total.weighted[LOSS].total) & (scale.value > SMALLEST)
        overflow = ~jnp.all(jnp.stack(held)) & mends
        total = unscaled(total, state)
        after, told = unless(overflow, lambda state: apply(state, total, *rest), state)
        after = dataclasses.replace(after, step=state.step + 1, scale=scale.after(overflow))
        return after, {**told, LOSS_SCALE: scale.value, OVERFLOWS: after.scale.skipped}

    return unscaled_apply


def unless(
    bad: jax.Array, update: Callable[[TrainState], tuple[TrainState, Metrics]], state: TrainState
) -> tuple[TrainState, Metrics]:
    """Return `update(state)`, or where `bad` the state as it is, with metrics of 0."""
    left = state, zeros_like(jax.eval_shape(update, state)[1])
    if cuda_capability() is None:
        # A choice between two states would be slower by up to half of a step that is mostly
        # optimizer. With the branches the other way around, XLA:CPU keeps two more gradients.
        return lax.cond(~bad, update, lambda state: (state, left[1]), state)  # type: ignore[no-any-return]
    # On a GPU it is part of the optimizer's kernels, and a branch would copy the whole state.
    return jax.tree.map(lambda old, new: jnp.where(bad, old, new), left, update(state))  # type: ignore[no-any-return]

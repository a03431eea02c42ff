"""Dynamic loss scaling: keep the gradients of a float16 computation in range."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.core.ground.leaves import PyTree
from replicax.core.ground.traced_for import cuda_capability
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.step.accumulate import scale_of, zeros_like
from replicax.core.step.base import Apply, StepFigure, StepSums
from replicax.core.step.loss import LOSS

FIRST = 2.0**16
"""The initial scale of a mean, as in PyTorch's `GradScaler`."""
LARGEST = 2.0**24
SMALLEST = 2.0**-14
"""The smallest scale: gradients too large at this scale are not treated as an overflow."""
PATIENCE = 2000
"""Steps without overflow after which the scale is doubled, as in PyTorch's `GradScaler`."""

_MOST = float(np.finfo(np.float16).max)

LOSS_SCALE = "loss_scale"
"""The metric of a scaled step: the scale used for its gradient."""
OVERFLOWS = "overflows"
"""The metric of a scaled step: the number of steps skipped so far due to overflow, including it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scale:
    """The factor applied to the loss before differentiation, a power of two."""

    value: Any
    """float32 scalar."""
    good: Any
    """int32 scalar: steps without overflow since the last change."""
    skipped: Any
    """int32 scalar: steps skipped due to overflow."""

    def after(self, overflow: jax.Array) -> "Scale":
        """Return the next scale: halved after an overflow, doubled after `PATIENCE` steps."""
        doubles = ~overflow & (self.good + 1 >= PATIENCE)
        factor = jnp.where(overflow, 0.5, jnp.where(doubles, 2.0, 1.0))
        return Scale(
            jnp.clip(self.value * factor, SMALLEST, LARGEST).astype(jnp.float32),
            jnp.where(overflow | doubles, 0, self.good + 1).astype(jnp.int32),
            self.skipped + overflow.astype(jnp.int32),
        )


def first_scale() -> Scale:
    """Return the scale of the first step."""
    return Scale(jnp.float32(FIRST), jnp.int32(0), jnp.int32(0))


def unscaled(total: StepSums, state: TrainState) -> StepSums:
    """Return `total` with its gradient divided by the scale of `state`, if it has one."""
    scale = scale_of(state)
    if scale is None:
        return total
    gradient = jax.tree.map(lambda leaf: leaf / scale, total.gradient)  # exact: a power of two
    return dataclasses.replace(total, gradient=gradient)


def overflows(state: TrainState) -> int:
    """Return the number of steps skipped due to overflow."""
    return int(state.scale.skipped) if state.scale else 0


def settled(step: Callable[[TrainState], Any], state: TrainState) -> TrainState:
    """Return the state after the first step without overflow; `state` itself if it has no scale."""
    while state.scale:
        before = overflows(state)
        state, _ = step(state)
        if overflows(state) == before:
            break
    return state


def unscaling(apply: Apply) -> Apply:
    """Return `apply` on the unscaled gradient; on overflow it is skipped and only counted.

    A loss that is not finite is not an overflow, as no scale would fix it. All replicas decide
    alike, as they use the same reduced sums.
    """

    def unscaled_apply(
        state: TrainState, total: StepSums, extras: PyTree, reduction_state: PyTree
    ) -> tuple[TrainState, Metrics]:
        scale: Scale = state.scale
        # Check the sum over all rows, so that the number of parts in it does not matter.
        held = [jnp.all(jnp.abs(leaf) <= _MOST) for leaf in jax.tree.leaves(total.gradient)]
        mends = jnp.isfinite(total.weighted[LOSS].total) & (scale.value > SMALLEST)
        overflow = ~jnp.all(jnp.stack(held)) & mends
        total = unscaled(total, state)
        after, metrics = unless(
            overflow, lambda state: apply(state, total, extras, reduction_state), state
        )
        after = dataclasses.replace(after, step=state.step + 1, scale=scale.after(overflow))
        figures: Any = {
            LOSS_SCALE: StepFigure(scale.value, latest=True),
            OVERFLOWS: StepFigure(after.scale.skipped, latest=True),
        }
        return after, {**metrics, **figures}

    return unscaled_apply


def plain(apply: Apply) -> Apply:
    """Return `apply` with the values of its `StepFigure`s as metrics."""

    def plain_apply(*given: PyTree) -> tuple[TrainState, Metrics]:
        after, metrics = apply(*given)
        return after, {name: value_of(each) for name, each in metrics.items()}

    return plain_apply


def value_of(metric: Any) -> Any:
    """Return a metric as a scalar."""
    return metric.value if isinstance(metric, StepFigure) else metric


def unless(
    bad: jax.Array, update: Callable[[TrainState], tuple[TrainState, Metrics]], state: TrainState
) -> tuple[TrainState, Metrics]:
    """Return `update(state)`, or if `bad` the unchanged state, metrics of 0 and no figures."""
    unchanged = (
        state,
        jax.tree.map(
            lambda each: StepFigure(jnp.inf, each.latest) if _is_figure(each) else zeros_like(each),
            jax.eval_shape(update, state)[1],
            is_leaf=_is_figure,
        ),
    )
    if cuda_capability() is None:
        # Selecting between two states would be up to 50% slower in a step that is mostly
        # optimizer. With the branches swapped, XLA:CPU keeps two more gradients.
        return lax.cond(~bad, update, lambda state: (state, unchanged[1]), state)  # type: ignore[no-any-return]
    # On a GPU the selection fuses into the optimizer's kernels; a branch would copy the state.
    return jax.tree.map(lambda old, new: jnp.where(bad, old, new), unchanged, update(state))  # type: ignore[no-any-return]


def _is_figure(node: Any) -> bool:
    return isinstance(node, StepFigure)

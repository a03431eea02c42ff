"""A training step that skips harmful updates."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.data.per_row import map_rows_of_state
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.leaves import PyTree, by_path, shapes_by_path
from replicax.core.ground.train_state import Metrics, TrainState, was_donated
from replicax.core.models.definition import is_trainable
from replicax.core.step.base import Apply, StepSums
from replicax.core.step.loss import LOSS
from replicax.core.step.loss_scale import unless
from replicax.core.step.objective import only_read
from replicax.errors import ConfigError
from replicax.text.arguments import Count, typed

NOT_FINITE = "not_finite"
"""Metric of a guarded step: 0, or `LOSS_NOT_FINITE`, or the number, from 1, of the first array of
`judged` with an element that is not finite; int32."""
LOSS_NOT_FINITE = -1
SPIKE = "spike"
"""Metric of a guarded step whose state has `losses`: whether its loss is far above them."""
SPIKE_WINDOW = 128
"""Number of losses to compare with. It and `SPIKE_SIGMAS` are the values of MaxText and OLMo-core
(`skip_step_interval` and `skip_step_scaling_factor`; `SkipStepOptimizer`)."""
SPIKE_SIGMAS = 6.0
"""Standard deviations above the mean from which a loss counts as a spike."""
_NO_LOSS = float(np.finfo(np.float32).max)
"""In a window that is not full. It makes the deviation infinite, so that no loss is a spike, and is
finite itself, for `jax_debug_nans` and `jax_debug_infs`."""
_LARGEST_GRADIENT = float(np.sqrt(np.finfo(np.float32).max))
"""1.8e19: squares of larger values, as in Adam and in norms, are not finite in float32."""


@typed
@dataclasses.dataclass(frozen=True)
class Guard:
    """When to skip a step and record its examples, and when to stop a run that skips steps.

    Examples:
        >>> guard = rx.Guard(max_bad_steps=10, skip_spikes=True)
        >>> rx.fit(dp, state, source, batch_size=32, epochs=9, guard=guard)

    Args:
        max_bad_steps: consecutive steps with a non-finite loss or gradient before the run stops.
        skip_spikes: whether to skip steps too whose loss is a spike: `SPIKE_SIGMAS` standard
            deviations above the mean of the last `SPIKE_WINDOW` losses that were none.
    """

    max_bad_steps: Count = 5
    skip_spikes: bool = False


def guarded(
    dp: DataParallel, state: TrainState, around: tuple[Callable[[Apply], Apply], ...] = ()
) -> DataParallel:
    """Return a `dp` whose bad steps leave the state unchanged, except for the `step` counter.

    A step is bad if its loss or any gradient element that the optimizer reads is not finite (or has
    a non-finite square), or, with a state from `with_losses`, if its loss is a spike. `step` then
    returns the metrics `NOT_FINITE` and `SPIKE`, and does not raise if the first loss is not
    finite: the caller reads the metrics and decides. See `replicax.train.run.step_records`.

    This also preserves evidence for an audit: a flipped bit in one replica's weights can make the
    next gradient NaN on all replicas, and applying it would make them equal again.
    """
    return dp.wrapping(_Around(around), state)


@dataclasses.dataclass(frozen=True)
class _Around:
    """The guard around other wrappers; equal if the wrappers are."""

    wraps: tuple[Callable[[Apply], Apply], ...]

    def __call__(self, apply: Apply) -> Apply:
        for wrap in self.wraps:
            apply = wrap(apply)
        return skip_bad_steps(apply)


def with_losses(state: TrainState) -> TrainState:
    """Return `state` with an empty window of losses, so that a guarded step skips spikes too.

    A spike is a loss more than `SPIKE_SIGMAS` standard deviations above the mean of the last
    `SPIKE_WINDOW` losses that were not spikes, once the window is full.
    """
    if jax.tree.leaves(state.islands):  # each has its own
        inner = with_losses(state.islands.inner)
        return dataclasses.replace(state, islands=dataclasses.replace(state.islands, inner=inner))
    if jax.tree.leaves(state.losses):
        return state
    shape, where = (*state.step.shape, SPIKE_WINDOW), state.step.sharding
    losses: object = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
    if not isinstance(state.step, jax.ShapeDtypeStruct):
        losses = jnp.full(shape, _NO_LOSS, jnp.float32, device=where)
    return dataclasses.replace(state, losses=losses)


def at_start(dp: DataParallel, state: TrainState, guard: Guard) -> TrainState:
    """Return the state that a run begins with: placed as `dp` has it, with a window if needed."""
    if not was_donated(state):
        state = dataclasses.replace(dp.place(state), losses=state.losses)
    return with_losses(state) if guard.skip_spikes else state


def skip_bad_steps(apply: Apply) -> Apply:
    """Return an `apply` whose bad steps keep the state, bit for bit, and only advance `step`.

    All replicas make the same decision, as they see the same all-reduced sums.
    """

    def guarded_apply(
        state: TrainState, total: StepSums, *rest: PyTree
    ) -> tuple[TrainState, Metrics]:
        def update(state: TrainState) -> tuple[TrainState, Metrics]:
            return apply(state, total, *rest)

        _check_alike(state, jax.eval_shape(update, state)[0])
        extra_metrics, losses = _judge(state.losses, total)
        bad = jnp.stack([verdict != 0 for verdict in extra_metrics.values()]).any()
        after, metrics = unless(bad, update, state)
        after = dataclasses.replace(after, step=state.step + 1, losses=losses)
        return after, {**metrics, **extra_metrics}

    return guarded_apply


def _check_alike(state: TrainState, after: TrainState) -> None:
    """Raise `ConfigError` if shapes or dtypes of the state differ before and after a step."""
    before, now = shapes_by_path(state), shapes_by_path(after)
    for path in {**before, **now}:
        found, wanted = now.get(path, "not there"), before.get(path, "not there")
        if found != wanted:
            raise ConfigError(
                f"state{path} is {wanted} before a step and {found} after it; both must be the "
                "same, as a bad step keeps the old state: cast it in the optimizer's update"
            )


def _judge(losses: Any, total: StepSums) -> tuple[Metrics, Any]:
    """Return the extra metrics of a step, and the window of losses for the next one."""
    verdict = _not_finite(total)
    not_finite = verdict != 0
    if not jax.tree.leaves(losses):
        return {NOT_FINITE: verdict}, losses
    loss = total.weighted[LOSS].mean().astype(jnp.float32)
    # If the window is not full, the deviation is infinite and the comparison is false.
    spike = loss > jnp.mean(losses) + SPIKE_SIGMAS * jnp.std(losses, ddof=1)
    enters = jnp.isfinite(loss) & ~spike & ~not_finite
    pushed = jnp.where(enters, jnp.append(losses[1:], loss), losses)
    return {NOT_FINITE: verdict, SPIKE: spike & ~not_finite}, pushed


def _not_finite(total: StepSums) -> jax.Array:
    """Return which of the loss, the gradient elements and their squares is not finite first.

    Each array has a number, and the largest of those with such an element is taken: one reduction
    over the shards of a split gradient, without keeping the arrays for one another.
    """
    leaves = jax.tree.leaves(total.gradient)
    numbers = [
        jnp.max(jnp.where(jnp.abs(leaf) < _LARGEST_GRADIENT, 0.0, float(number)), initial=0.0)
        for number, leaf in zip(range(len(leaves), 0, -1), leaves, strict=True)
    ]
    largest = functools.reduce(jnp.maximum, numbers, jnp.float32(0))
    first = jnp.where(largest > 0, len(leaves) + 1 - largest, 0).astype(jnp.int32)
    return jnp.where(jnp.isfinite(total.weighted[LOSS].total), first, LOSS_NOT_FINITE)


def judged(dp: DataParallel, state: TrainState) -> list[str]:
    """Return names of the arrays that must be finite: a gradient's, or a custom step's state's."""
    if dp.configuration.step is not None:
        arrays, others = (
            by_path(state.params),
            by_path(map_rows_of_state(lambda _: (), state.params)),
        )
        ordered = [*others, *(path for path in arrays if path not in others)]  # as in `total`
        return [f"state{path}" for path in ordered if is_trainable(arrays[path])]
    read = only_read(state.params, dp.program(state).updater.read)
    return [f"the gradient of {path or 'the model'}" for path in by_path(read)]

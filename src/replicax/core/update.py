"""One step of training: the mathematics, written once, as a function of one replica's view."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from replicax.core.accumulate import Accumulator, Apply, Part
from replicax.core.batch import Batch
from replicax.core.loss import LOSS, WeightedSum
from replicax.core.mesh import Axis
from replicax.core.models.definition import PyTree, View
from replicax.core.objective import Objective, StepSums, with_zeros
from replicax.core.optimizer import Updater
from replicax.core.reduction import Reduce


@partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        *("step", "params", "opt_state", "extras", "seed", "losses", "reduction", "scale")
    ],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes, and the seed that it draws from: a plain pytree.

    The same tree with shapes or shardings for leaves describes a state.

    Examples:
        >>> state, metrics = dp.step(state, batch)
        >>> int(state.step), state.params["w"].shape
        (1, (3,))
    """

    step: Any
    """int32 scalar: steps done, those whose update was skipped among them."""
    params: PyTree
    """Trainable arrays."""
    opt_state: PyTree
    """The optimizer's state."""
    extras: PyTree
    """The model's other arrays: BatchNorm's statistics, say."""
    seed: Any
    """uint32 scalar: all random numbers of the run follow from it and the step."""
    losses: Any = ()
    """float32 `[window]`, where spikes are skipped: the last losses, the newest last, NaN before
    the first; else empty. See `replicax.train.guarded`."""
    reduction: PyTree = ()
    """State of the reduction, where it has one: leaves `[replicas, ...]`, split over them."""
    scale: PyTree = ()
    """Scale of the loss, where the precision needs one; see `replicax.core.scaling`."""

    def __repr__(self) -> str:
        leaves, params = jax.tree.leaves(self), jax.tree.leaves(self.params)
        if not all(hasattr(leaf, "dtype") for leaf in leaves):  # shardings, say
            kinds = dict.fromkeys(type(leaf).__name__ for leaf in leaves)
            return f"TrainState({len(leaves)} leaves: {', '.join(kinds)})"
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
        taken = f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"
        count = sum(math.prod(leaf.shape) for leaf in params)
        return f"TrainState(step={_number(self.step)}, {count:,} parameters, {taken})"


Metrics = dict[str, jax.Array]


def _number(step: Any) -> str:
    """`step` where it is known now, else a question mark."""
    try:
        return str(int(step)) if step.is_ready() else "?"
    except Exception:  # a shape, a tracer, or given to a later step
        return "?"


def update(
    state: TrainState, batch: Batch, *, sums: Callable[..., Any], apply: Apply
) -> tuple[TrainState, Metrics]:
    """One step: sums over the global batch, one division, one optimizer update.

    `sums` is `step_sums`, mapped onto the mesh. `apply` makes the next state of the total, and
    metrics of its own: `apply_gradient`, or a wrapper. It sees whole arrays in every mode, each as
    its layout splits it.
    """
    total, extras, carried = sums(state, batch)
    with jax.named_scope("update"):
        state, verdicts = apply(state, total, extras, carried)
    return state, {**total.means(), **verdicts}


def step_sums(
    state: TrainState,
    batch: Batch,
    axis: Axis | None,
    *,
    objective: Objective,
    accumulator: Accumulator,
    reduce: Reduce,
) -> tuple[StepSums, PyTree, PyTree]:
    """Return the sums of a step: local ones, and one reduction.

    They are the total, the model's other arrays after it, and the reduction's state after it.
    `batch` has this replica's rows, or all where there is no `axis`.
    """
    summing = Summing(accumulator, reduce, axis)
    return summing(objective.step_sums, state, batch, step_key(state))


@dataclasses.dataclass(frozen=True)
class Summing:
    """The primitive: sums over the rows of a replica, then one reduction."""

    accumulator: Accumulator
    """Rows -> sums, micro-batch by micro-batch."""
    reduce: Reduce
    """The sums of each replica -> those of all."""
    axis: Axis | None
    """The replica axis, or None where the batch is the whole one."""

    def __call__(
        self, part: Part, state: TrainState, batch: Batch, key: jax.Array | None
    ) -> tuple[StepSums, PyTree, PyTree]:
        """Return the sums of `part` over the global batch, the model's other arrays after it, and
        the reduction's state after it.
        """
        with jax.named_scope("gradient"):
            sums, extras = self.accumulator(part, state, batch.whole(), key, self.axis)
        with jax.named_scope("reduction"):
            total, carried = self.reduce(sums, state.reduction, self.axis)  # the only communication
        return total, extras, carried


def apply_gradient(
    state: TrainState, total: StepSums, extras: PyTree, carried: PyTree, *, updater: Updater
) -> tuple[TrainState, Metrics]:
    """Return the state after the optimizer has seen the gradient of the global mean loss.

    That is 0, and the loss NaN, in a batch in which nothing has any weight.
    """
    gradient = mean_gradient(total, state.params, updater.read)
    value = {"value": total.weighted[LOSS].mean()} if updater.takes_value else {}
    update = updater.optimizer.update
    updates, opt_state = update(gradient, state.opt_state, state.params, **value)
    after = dataclasses.replace(
        state,
        step=state.step + 1,
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        extras=extras,
        reduction=carried,
    )
    return after, {}


def mean_gradient(total: StepSums, params: PyTree, read: tuple[bool, ...] | None = None) -> PyTree:
    """Return the gradient of the global mean loss, by params; 0 where nothing has any weight."""
    # The sum is 0 then. To choose between two states would cost a tenth of an optimizer's step.
    divisor = jnp.where(total.weight > 0, total.weight, 1)
    # In the parameter's dtype, as `jax.grad` gives it: an optimizer's moments keep theirs then.
    return jax.tree.map(
        lambda leaf, param: (leaf / divisor).astype(param.dtype),
        with_zeros(total.gradient, params, read),
        params,
    )


def score(
    state: TrainState,
    batch: Batch,
    axis: Axis | None,
    *,
    objective: Objective,
    accumulator: Accumulator,
    reduce: Reduce,
) -> dict[str, WeightedSum]:
    """Return the sums of loss and metrics over the global batch, the model in evaluation mode.

    `"rows"` counts the real rows: its total, with weight 1.
    """

    def part(params: PyTree, extras: PyTree, rows: Batch, view: View) -> Any:
        found, extras = objective.loss_sums(params, extras, rows, view)
        count = jnp.sum(rows.mask)
        sums = {**found, "rows": WeightedSum(count, jnp.zeros_like(count))}
        return StepSums((), sums), extras

    total, _, _ = Summing(accumulator, reduce, axis)(part, state, batch, None)
    return total.weighted


def step_key(state: TrainState) -> jax.Array:
    """Return the key of a step: a function of seed and step."""
    return jax.random.fold_in(jax.random.key(state.seed), state.step)

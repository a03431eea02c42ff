"""How far the gradients of parts of a batch are apart: what the gradient noise scale is made of.

McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv:1812.06162), appendix
A.1, compare the squared norm of a batch's gradient with those of smaller ones. Here these are
disjoint parts of one batch, and the parts may weigh unequally.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.core.accumulate import Sequential, cut, folded, zeros_like
from replicax.core.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import replicated, row_axis
from replicax.core.models.definition import PyTree
from replicax.core.modes import MODES, batch_shardings, lift
from replicax.core.objective import Objective, only_read
from replicax.core.scaling import unscaled
from replicax.core.update import TrainState, step_key

PARTS = 4
"""Of a batch, on any number of devices. Two would do, and give |G|² with twice the variance that
many parts tend to; four come within a third of that, and each adds a reduction."""


class NoiseSample(NamedTuple):
    """Unbiased estimates from one batch, float32 scalars: average many before dividing any.

    NaN where fewer than two parts have any weight.
    """

    squared_gradient_norm: Any
    """|G|², G the gradient of the mean loss over all data; noise can make it negative."""
    trace: Any
    """tr Σ, the variance of the gradient of one row, summed over the parameters."""
    rows: Any
    """Real rows of the batch."""


def noise_probe(dp: DataParallel, state: TrainState) -> Any:
    """Return what measures the noise in the gradient, beside the training, which it leaves as is.

    It is one program in all modes: the compiler splits each part's rows over the devices, as in
    mode `jit`. The parts hold the same rows on any number of devices, and are computed one after
    the other, in at least as many micro-batches as the step. It holds two gradients, split as the
    layout splits the parameters, and moves what `PARTS` steps reduce.

    Args:
        dp: with a model.
        state: of `dp`, or its shapes.

    Returns:
        A `jax.jit` function of a state, that before a step, and the step's batch; it gives a
        `NoiseSample`.
    """
    program, mesh = dp.program(state), dp.mesh
    function = partial(
        _sample,
        objective=program.objective,
        micro_batches=-(-dp.split.micro_batches // PARTS),
        mesh=mesh,
        shardings=only_read(program.shardings.params, program.objective.read),
    )
    return lift(
        function, MODES["jit"], mesh, program.shardings, batch_shardings(mesh), replicated(mesh)
    )


def _sample(
    state: TrainState,
    batch: Batch,
    _axis: None,
    *,
    objective: Objective,
    micro_batches: int,
    mesh: Mesh,
    shardings: PyTree,
) -> NoiseSample:
    """The estimates from the parts of the whole batch.

    A part of weight w has a mean gradient g of expectation G and covariance Σ / w; the whole batch,
    of weight W, their mean. So the sum of w |g - mean|² over the n parts has expectation
    (n - 1) tr Σ, whatever they weigh, and |mean|² has |G|² + tr Σ / W. Where parts weigh alike this
    is appendix A.1 with a part as the small batch and the whole as the big one.
    """
    batch, accumulate, key = batch.whole(), Sequential(micro_batches), step_key(state)

    def gradient(number: jax.Array, rows: Batch) -> tuple[PyTree, jax.Array]:
        sums, _ = accumulate(objective.step_sums, state, rows, folded(key, number), None)
        divisor = jnp.where(sums.weight > 0, sums.weight, 1)
        mean = jax.tree.map(lambda leaf: leaf / divisor, unscaled(sums, state).gradient)
        return lax.with_sharding_constraint(mean, shardings), sums.weight

    def add(carry: Any, numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        mean, weight, scatter, count = carry
        found, own = gradient(*numbered)
        # Welford's way: the difference of two nearly equal sums would lose all digits.
        apart = jax.tree.map(jnp.subtract, found, mean)
        share = own / jnp.where(weight + own > 0, weight + own, 1)
        mean = jax.tree.map(lambda old, step: old + share * step, mean, apart)
        scatter = scatter + weight * share * optax.tree.norm(apart, squared=True)
        return (mean, weight + own, scatter, count + (own > 0)), None

    # Neighbours go to different parts: no row leaves its device, and the padding at the end, of
    # which each number of devices needs another, leaves the real rows in their parts.
    parts = jax.tree.map(partial(cut, parts=PARTS), _padded(batch, PARTS * micro_batches))
    parts = lax.with_sharding_constraint(
        parts, NamedSharding(mesh, PartitionSpec(None, row_axis(mesh)))
    )
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    zeros, weight = zeros_like(jax.eval_shape(gradient, jnp.int32(0), first))
    carry = (lax.with_sharding_constraint(zeros, shardings), weight, weight, jnp.int32(0))
    (mean, weight, scatter, count), _ = lax.scan(add, carry, (jnp.arange(PARTS), parts))
    noise = scatter / (count - 1) / weight  # of the whole batch's gradient; 0 / 0 for one part
    rows = jnp.sum(batch.mask)
    return NoiseSample(optax.tree.norm(mean, squared=True) - noise, noise * rows, rows)


def _padded(batch: Batch, multiple: int) -> Batch:
    """The whole batch, padded to a multiple of so many rows."""
    if batch.size % multiple == 0:
        return batch
    index = jnp.arange(-(-batch.size // multiple) * multiple)
    padded: Batch = jax.tree.map(lambda leaf: leaf[index % batch.size], batch)
    return dataclasses.replace(padded, mask=jnp.where(index < batch.size, padded.mask, 0))

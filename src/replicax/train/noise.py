"""How far the gradients of parts of a batch are apart: what the gradient noise scale is made of.

McCandlish et al., An Empirical Model of Large-Batch Training, 2018 (arXiv:1812.06162), appendix
A.1, compare the squared norm of a batch's gradient with those of smaller ones. Here these are
disjoint parts of one batch, and the parts may weigh unequally.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.core.accumulate import Sequential, folded, zeros_like
from replicax.core.batch import Batch
from replicax.core.capacity import check_fits
from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import DATA, replicated
from replicax.core.models.definition import PyTree
from replicax.core.modes import MODES, batch_shardings, lift
from replicax.core.objective import Objective, only_read
from replicax.core.ready import agree_on_program
from replicax.core.scaling import unscaled
from replicax.core.update import TrainState, step_key

PARTS = 4
"""Of a batch, on any number of devices. Two would do, and give |G|² with twice the variance that
many parts tend to; four come within a third of that, and each adds a reduction."""


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["squared_gradient_norm", "trace", "rows"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class NoiseSample:
    """Unbiased estimates from one batch, float32 scalars: average many before dividing any.

    NaN where fewer than two parts have any weight.
    """

    squared_gradient_norm: Any
    """|G|², G the gradient of the mean loss over all data; noise can make it negative."""
    trace: Any
    """tr Σ, the variance of the gradient of one row, summed over the parameters."""
    rows: Any
    """Real rows of the batch."""


class NoiseProbe:
    """Measures the noise in the gradient beside the training, in which nothing changes.

    It is one program in all modes: the compiler splits each part's rows over the devices, as in
    mode `jit`. The parts hold the same rows on any number of devices, and are computed one after
    the other, in at least as many micro-batches as the step. It holds two gradients, split as the
    layout splits the parameters, and moves what `PARTS` steps reduce.

    Args:
        dp: with a model.
        state: of `dp`, or its shapes.
    """

    def __init__(self, dp: DataParallel, state: TrainState) -> None:
        program = dp.program(state)
        mesh, shardings = dp.mesh, program.shardings
        function = partial(
            _sample,
            objective=dataclasses.replace(program.objective, split=None),
            micro_batches=-(-dp.split.micro_batches // PARTS),
            mesh=mesh,
            shardings=only_read(shardings.params, program.objective.read),
        )
        self._mesh = mesh
        self._agree = partial(agree_on_program, program.configuration, "the noise measurement")
        self._compute = lift(
            function, MODES["jit"], mesh, shardings, batch_shardings(mesh), replicated(mesh)
        )
        self._seen: set[Any] = set()

    def prepare(self, state: TrainState, batch: Batch) -> None:
        """Compile for batches of this shape, where that is not done.

        Raises:
            ConfigError: it needs more memory than there is.
            AgreementError: processes that would run different programs.
        """
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch))
        if shapes in self._seen:
            return
        lowered = self._compute.lower(state, batch)
        self._agree((state, batch), lowered)
        check_fits(lowered.compile(), self._mesh, batch.size)
        self._seen.add(shapes)

    def take(self, state: TrainState, batch: Batch) -> NoiseSample:
        """Measure on the devices, without waiting for it.

        Args:
            state: the one before the step on `batch`; it stays as it is.
            batch: from `feed`.
        """
        self.prepare(state, batch)
        sample: NoiseSample = self._compute(state, batch)
        return sample


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

    Args:
        state: before the step.
        batch: the whole one.
        objective: the loss on the model.
        micro_batches: of each part.
        mesh: the devices.
        shardings: of gradients.
    """
    batch, accumulate = batch.whole(), Sequential(micro_batches)
    key = step_key(state)

    def gradient(number: jax.Array, rows: Batch) -> tuple[PyTree, jax.Array]:
        own = folded(key, number)
        sums, _ = accumulate(objective.step_sums, state, rows, own, None)
        weight = sums.weight
        mean = jax.tree.map(lambda leaf: leaf / _or_one(weight), unscaled(sums, state).gradient)
        return lax.with_sharding_constraint(mean, shardings), weight

    def add(carry: Any, numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        mean, weight, scatter, count = carry
        found, own = gradient(*numbered)
        # Welford's way: the difference of two nearly equal sums would lose all digits.
        apart = jax.tree.map(jnp.subtract, found, mean)
        share = own / _or_one(weight + own)
        mean = jax.tree.map(lambda old, step: old + share * step, mean, apart)
        scatter = scatter + weight * share * _squared_norm(apart)
        return (mean, weight + own, scatter, count + (own > 0)), None

    parts = _cut(batch, PARTS * micro_batches)
    parts = lax.with_sharding_constraint(parts, NamedSharding(mesh, PartitionSpec(None, DATA)))
    first = jax.tree.map(lambda leaf: leaf[0], parts)
    zeros, weight = zeros_like(jax.eval_shape(gradient, jnp.int32(0), first))
    carry = (lax.with_sharding_constraint(zeros, shardings), weight, weight, jnp.int32(0))
    (mean, weight, scatter, count), _ = lax.scan(add, carry, (jnp.arange(PARTS), parts))
    noise = scatter / (count - 1) / weight  # of the whole batch's gradient; 0 / 0 for one part
    rows = jnp.sum(batch.mask)
    return NoiseSample(_squared_norm(mean) - noise, noise * rows, rows)


def _squared_norm(tree: PyTree) -> jax.Array:
    """The sum of the squares of all elements."""
    squares = [jnp.sum(jnp.square(jnp.abs(leaf))) for leaf in jax.tree.leaves(tree)]
    return jnp.sum(jnp.stack(squares))


def _or_one(weight: jax.Array) -> jax.Array:
    """A divisor for sums that are 0 where the weight is."""
    return jnp.where(weight > 0, weight, 1)


def _cut(batch: Batch, multiple: int) -> Batch:
    """`[rows, ...]` -> `[PARTS, rows / PARTS, ...]`, part k holding the rows k, k + PARTS, ...

    Neighbours go to different parts, so that no row leaves its device, and the padding at the end,
    of which each number of devices needs another, leaves the real rows in their parts.

    Args:
        batch: the whole one.
        multiple: of rows that are wanted; where it does not divide them there is more padding.
    """
    size = batch.size
    if size % multiple:
        index = jnp.arange(-(-size // multiple) * multiple)
        batch = jax.tree.map(lambda leaf: leaf[index % size], batch)
        batch = dataclasses.replace(batch, mask=jnp.where(index < size, batch.mask, 0))

    def split(leaf: jax.Array) -> jax.Array:
        return jnp.moveaxis(leaf.reshape(-1, PARTS, *leaf.shape[1:]), 1, 0)

    cut: Batch = jax.tree.map(split, batch)
    return cut

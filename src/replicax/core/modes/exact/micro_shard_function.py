"""A step as a function of one micro-shard: the same for every number of devices."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import to_sum
from replicax.core.ground.train_state import TrainState
from replicax.core.modes.exact.fixed_tree import MicroShardAccumulator
from replicax.core.modes.exact.sharded_update import LooksAtWhole, MicroShard, by_pieces
from replicax.core.modes.step_builder import StepSpec, check_whole
from replicax.core.placement.mesh import AnyMesh, ShardDim, row_axis, split_dim
from replicax.core.step.base import Apply, StepSums, no_reduction
from replicax.core.step.loss import LOSS, WeightedSum
from replicax.core.step.objective import only_read
from replicax.core.step.reduction import Wire
from replicax.core.step.update import update
from replicax.errors import ConfigError

OnMicroShard = Callable[[TrainState, Batch, MicroShard], Any]
"""A function of the state, the rows of one micro-shard, and which micro-shard it is."""


def on_micro_shard(parts: StepSpec) -> OnMicroShard:
    """Return the program as a function of one micro-shard, not yet traced.

    `ConfigError` if an optimizer reads whole arrays of a state that is split.
    """
    reduction, apply = parts.reduction, parts.apply
    assert isinstance(reduction, Wire)
    if apply is not None and parts.names_replicas:
        check_whole(parts.layout)
        apply = _of_equal_replicas(apply, parts.mesh)
    dims: tuple[ShardDim, ...] | None = None
    if apply is not None and parts.gradient is not None:
        dims = tuple(map(split_dim, jax.tree.leaves(parts.gradient)))
        shard_dims = list(map(split_dim, jax.tree.leaves(parts.state)))
        _check_sharded_update(parts, apply, shard_dims, dims)

    def run(state: TrainState, batch: Batch, piece: MicroShard) -> Any:
        accumulator = MicroShardAccumulator(piece, reduction, dims)
        sums = partial(parts.sums, axis=None, accumulator=accumulator, reduce=no_reduction)
        if apply is None:
            return sums(state, batch)
        of_piece = apply
        if dims is not None:
            of_piece = by_pieces(apply, [*shard_dims, *dims], shard_dims, piece)
        return update(state, batch, sums=sums, apply=of_piece)

    return run


def _check_sharded_update(
    parts: StepSpec, apply: Apply, shard_dims: Sequence[ShardDim], dims: Sequence[ShardDim]
) -> None:
    """Raise `ConfigError` if updating a piece needs more than reductions over other pieces."""
    count, shapes = parts.micro_shards, parts.shapes

    def of_piece(number: jax.Array, state: TrainState, total: StepSums, *rest: PyTree) -> Any:
        piece = MicroShard(number, count)
        return by_pieces(apply, [*shard_dims, *dims], shard_dims, piece)(state, total, *rest)

    one: Any = jax.ShapeDtypeStruct((), jnp.float32)
    params = only_read(shapes.params, parts.objective.read)
    sums = jax.tree.map(partial(jax.eval_shape, to_sum), params)
    any_piece, number = MicroShard(None, count), jax.ShapeDtypeStruct((), jnp.int32)
    total = StepSums(any_piece.shapes(sums, dims), {LOSS: WeightedSum(one, one, divisor=one)})
    state = any_piece.shapes(shapes, shard_dims)
    try:
        jax.eval_shape(of_piece, number, state, total, shapes.extras, shapes.reduction)
    except LooksAtWhole as error:
        raise ConfigError(
            f"the optimizer's {error} reads a whole array, and in a bitwise reproducible mode each "
            f"of {count} micro-shards updates one piece of arrays that the layout splits: use "
            "layout='replicated', or an optimizer of elementwise operations and norms"
        ) from error


def _of_equal_replicas(apply: Apply, mesh: AnyMesh) -> Apply:
    """Return `apply` with the replica axis in scope, of size 1 since replicas are equal."""
    axis = row_axis(mesh)
    for name in [axis] if isinstance(axis, str) else axis:
        apply = jax.vmap(apply, in_axes=None, out_axes=None, axis_name=name, axis_size=1)
    return apply

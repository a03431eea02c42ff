"""The step that Replicax writes, on a mesh: sums of each replica, and an update of whole arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.accumulate import Apply
from replicax.core.batch import Batch
from replicax.core.by_replica import where_rows_are_apart
from replicax.core.configuration import Configuration
from replicax.core.gathering import Gathering
from replicax.core.layout import Layout
from replicax.core.loss import LOSS, WeightedSum
from replicax.core.mesh import (
    STAGE,
    AnyMesh,
    by_rows,
    is_data_only,
    replicated,
    row_axis,
    shard_axis,
    split_dim,
)
from replicax.core.models.definition import PyTree
from replicax.core.modes import MODES, Mode, batch_shardings
from replicax.core.objective import Objective, StepSums, only_read
from replicax.core.optimizer import Updater
from replicax.core.pieces import LooksAtWhole, Piece, by_pieces
from replicax.core.precision import to_sum
from replicax.core.reduction import as_they_are, parts_of
from replicax.core.same_program import Own
from replicax.core.scaling import unscaling
from replicax.core.stages import Staged
from replicax.core.update import Metrics, TrainState, apply_gradient, step_sums, update
from replicax.errors import ConfigError


def written_step(
    config: Configuration,
    mesh: AnyMesh,
    objective: Objective,
    updater: Updater,
    shapes: TrainState,
    shardings: TrainState,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return the step, not yet traced, for a state of these `shapes` that lies as `shardings` say.

    Raises:
        ConfigError: an optimizer that names the replicas, of a state that is split.
    """
    mode, layout, accumulator = config.mode, config.placing, config.accumulator(mesh)
    apply = _apply(config, updater)
    where = (shardings, batch_shardings(mesh))
    gradient: PyTree = replicated(mesh)
    parts = None
    if mode.per_replica and layout.splits_optimizer:
        gradient = only_read(layout.gradient_shardings(shapes.params, mesh), objective.read)
        parts = parts_of(gradient, mesh, summed=layout.splits_params)
    if updater.names_replicas and mode.per_replica:
        apply = _of_each_replica(apply, mesh, layout)
    split_objective = in_place(objective, config, shardings, mesh)

    def mapped(mode: Mode) -> Callable[[TrainState, Batch], Any]:
        reduce = mode.reduce(config.reduction, parts)
        sums = partial(step_sums, objective=split_objective, accumulator=accumulator, reduce=reduce)
        return mode.wrap(sums, mesh, where, _total(gradient, mesh))

    sums = mapped(mode)
    if mode.by_replica and layout.is_whole and is_data_only(mesh) and mesh.size > 1:
        sums = where_rows_are_apart(objective, mapped(MODES[mode.by_replica]), sums)
    return partial(update, sums=sums, apply=apply)


def written_step_of_micro_shard(
    config: Configuration,
    mesh: AnyMesh,
    objective: Objective,
    updater: Updater,
    shapes: TrainState,
    shardings: TrainState,
) -> Callable[[TrainState, Batch, Piece], tuple[TrainState, Metrics]]:
    """Return the same step as a function of one micro-shard, which meets the others in it.

    Raises:
        ConfigError: when traced, an optimizer that reads whole arrays of a state that is split.
    """
    layout, apply = config.placing, _apply(config, updater)
    of_micro_shard = config.mode.of_micro_shard
    assert of_micro_shard is not None
    dims: tuple[Own, ...] | None = None
    if updater.names_replicas:
        _check_whole(layout)
        apply = _of_equal_replicas(apply, mesh)
    if layout.splits_optimizer:
        gradient = only_read(layout.gradient_shardings(shapes.params, mesh), objective.read)
        dims = tuple(map(split_dim, jax.tree.leaves(gradient)))
        lies = list(map(split_dim, jax.tree.leaves(shardings)))
        _check_pieces(apply, config.micro_shards, shapes, objective.read, lies, dims)

    def step(state: TrainState, batch: Batch, piece: Piece) -> tuple[TrainState, Metrics]:
        sums = partial(
            step_sums,
            axis=None,
            objective=objective,
            accumulator=of_micro_shard(piece, config.reduction, dims),
            reduce=as_they_are,
        )
        of_state = apply if dims is None else by_pieces(apply, [*lies, *dims], lies, piece)
        return update(state, batch, sums=sums, apply=of_state)

    return step


def _check_pieces(
    apply: Apply,
    count: int,
    shapes: TrainState,
    read: tuple[bool, ...] | None,
    lies: Sequence[Own],
    dims: Sequence[Own],
) -> None:
    """Raise `ConfigError` where the update of a piece needs more than reductions of the others."""

    def of_piece(number: jax.Array, state: TrainState, total: StepSums, *rest: PyTree) -> Any:
        piece = Piece(number, count)
        return by_pieces(apply, [*lies, *dims], lies, piece)(state, total, *rest)

    def piece_of(tree: PyTree, dims: Sequence[Own]) -> PyTree:
        leaves, structure = jax.tree.flatten(tree)
        piece = Piece(None, count)
        sizes = [piece.shape(leaf.shape, dim) for leaf, dim in zip(leaves, dims, strict=True)]
        pairs = zip(sizes, leaves, strict=True)
        shapes = [jax.ShapeDtypeStruct(size, leaf.dtype) for size, leaf in pairs]
        return jax.tree.unflatten(structure, shapes)

    one: Any = jax.ShapeDtypeStruct((), jnp.float32)
    sums = jax.tree.map(partial(jax.eval_shape, to_sum), only_read(shapes.params, read))
    total = StepSums(piece_of(sums, dims), {LOSS: WeightedSum(one, one)})
    number = jax.ShapeDtypeStruct((), jnp.int32)
    state = piece_of(shapes, lies)
    try:
        jax.eval_shape(of_piece, number, state, total, shapes.extras, shapes.reduction)
    except LooksAtWhole as error:
        raise ConfigError(
            f"the optimizer's {error} reads a whole array, and in a mode with fixed bits each "
            f"of {count} micro-shards updates a piece of what the layout splits: use "
            "layout='replicated', or an optimizer that computes number by number, and norms"
        ) from error


def _apply(config: Configuration, updater: Updater) -> Apply:
    """The optimizer's part of the step, as the configuration has it."""
    apply = config.wrapped(partial(apply_gradient, updater=updater))
    return unscaling(apply) if config.precision.scales else apply


def _of_each_replica(apply: Apply, mesh: AnyMesh, layout: Layout) -> Apply:
    """`apply` where the axis of the replicas has its name, all arrays being whole."""
    _check_whole(layout)
    carried = by_rows(mesh).spec
    everywhere = replicated(mesh).spec
    names = (field.name for field in dataclasses.fields(TrainState))
    where = TrainState(**{**dict.fromkeys(names, everywhere), "reduction": carried})
    into = (where, everywhere, everywhere, carried)
    return jax.shard_map(
        apply, mesh=mesh, in_specs=into, out_specs=(where, everywhere), check_vma=False
    )


def _of_equal_replicas(apply: Apply, mesh: AnyMesh) -> Apply:
    """`apply` where the axis of the replicas has its name, and one of them stands for all."""
    axis = row_axis(mesh)
    for name in [axis] if isinstance(axis, str) else axis:
        apply = jax.vmap(apply, in_axes=None, out_axes=None, axis_name=name, axis_size=1)
    return apply


def _check_whole(layout: Layout) -> None:
    if not layout.is_whole:
        raise ConfigError(
            f"layout={layout.name!r} and an optimizer that names the axis of the replicas, each of "
            "which has a part of its arrays: use layout='replicated', or take lax.pmean out of it"
        )


def _total(gradient: PyTree, mesh: AnyMesh) -> tuple[StepSums, Any, Any]:
    """Where the results of `step_sums` lie, a gradient's total as `gradient` says."""
    weighted: Any = replicated(mesh)
    return StepSums(gradient, weighted), replicated(mesh), by_rows(mesh)


def in_place(
    objective: Objective, config: Configuration, shardings: TrainState, mesh: AnyMesh
) -> Objective:
    """Return `objective` on parameters that lie as the layout of `config` has them."""
    if mesh.shape.get(STAGE, 1) > 1:
        return Staged(
            *(objective.definition, objective.loss, objective.precision, objective.read),
            mesh=mesh,
            shardings=shardings.params,
            micro_batches=config.accumulate,
            schedule=config.layout.schedule,
        )
    if not config.layout.splits_params:
        return objective
    gathering = Gathering(shardings.params, shard_axis(mesh), config.mode.per_replica)
    return dataclasses.replace(objective, gathering=gathering)

"""The built-in step on a mesh: sums per replica, and an update of global arrays."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.config import Configuration
from replicax.core.data.batch import Batch
from replicax.core.exact.sharded_update import LooksAtWhole, MicroShard, by_pieces
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import to_sum
from replicax.core.ground.train_state import Metrics, TrainState
from replicax.core.models.definition import Definition
from replicax.core.modes import MODES, Mode
from replicax.core.per_replica_sums import where_rows_are_apart
from replicax.core.pipeline.staged_objective import Staged
from replicax.core.placement.layout import Layout
from replicax.core.placement.mesh import (
    STAGE,
    AnyMesh,
    ShardDim,
    batch_shardings,
    by_rows,
    is_data_only,
    replicated,
    row_axis,
    shard_axis,
    split_dim,
)
from replicax.core.step.accumulate import Apply
from replicax.core.step.fsdp_gather import Gathering
from replicax.core.step.loss import LOSS, WeightedSum
from replicax.core.step.loss_scale import unscaling
from replicax.core.step.objective import Objective, StepSums, only_read
from replicax.core.step.optimizer import Updater
from replicax.core.step.reduction import no_reduction, parts_of
from replicax.core.step.update import apply_gradient, step_sums, update
from replicax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class ModelOnMesh:
    """A configuration and a model on a mesh: everything needed to build a step."""

    configuration: Configuration
    mesh: AnyMesh
    definition: Definition
    updater: Updater
    """The optimizer, restricted to trainable parameters, with averaging if requested."""
    shapes: TrainState
    """Shapes and dtypes of a state."""

    @cached_property
    def shardings(self) -> TrainState:
        """The shardings of a state."""
        return self.configuration.placing.shardings(self.shapes, self.mesh)

    @cached_property
    def objective(self) -> Objective:
        """The loss of the model on whole parameters."""
        config = self.configuration
        return Objective(self.definition, config.loss, config.precision, self.updater.read)

    @cached_property
    def split_objective(self) -> Objective:
        """`objective` on parameters split according to the layout."""
        config, objective = self.configuration, self.objective
        if self.mesh.shape.get(STAGE, 1) > 1:
            return Staged(
                *(objective.definition, objective.loss, objective.precision, objective.read),
                mesh=self.mesh,
                shardings=self.shardings.params,
                micro_batches=config.accumulate,
                schedule=config.layout.schedule,
            )
        if not config.layout.splits_params:
            return objective
        axis = shard_axis(self.mesh)
        gathering = Gathering(self.shardings.params, axis, config.mode.per_replica)
        return dataclasses.replace(objective, gathering=gathering)

    @property
    def of_gradient(self) -> PyTree:
        """The shardings of the reduced gradient (where read), if a layout splits it."""
        whole = self.configuration.placing.gradient_shardings(self.shapes.params, self.mesh)
        return only_read(whole, self.updater.read)

    @property
    def apply(self) -> Apply:
        """The optimizer update of the step."""
        apply = self.configuration.wrapped(partial(apply_gradient, updater=self.updater))
        return unscaling(apply) if self.configuration.precision.scales else apply


def written_step(on: ModelOnMesh) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Return the step, not yet traced.

    `ConfigError` if an optimizer names the replica axis and the layout splits its state.
    """
    config, mesh, apply, parts = on.configuration, on.mesh, on.apply, None
    mode, layout, accumulator = config.mode, config.placing, config.accumulator(mesh)
    gradient: PyTree = replicated(mesh)
    if mode.per_replica and layout.splits_optimizer:
        gradient = on.of_gradient
        parts = parts_of(gradient, mesh, summed=layout.splits_params)
    if on.updater.names_replicas and mode.per_replica:
        apply = _of_each_replica(apply, mesh, layout)
    into = on.shardings, batch_shardings(mesh)
    weighted: Any = replicated(mesh)
    out = StepSums(gradient, weighted), replicated(mesh), by_rows(mesh)

    def mapped(mode: Mode) -> Callable[[TrainState, Batch], Any]:
        reduce = mode.reduce(config.reduction, parts)
        sums = partial(
            step_sums, objective=on.split_objective, accumulator=accumulator, reduce=reduce
        )
        return mode.wrap(sums, mesh, into, out)

    sums = mapped(mode)
    if mode.by_replica and layout.is_whole and is_data_only(mesh) and mesh.size > 1:
        sums = where_rows_are_apart(on.objective, mapped(MODES[mode.by_replica]), sums)
    return partial(update, sums=sums, apply=apply)


def written_step_of_micro_shard(
    on: ModelOnMesh,
) -> Callable[[TrainState, Batch, MicroShard], tuple[TrainState, Metrics]] | None:
    """Return the same step for a micro-shard; None if the mode is not bitwise reproducible.

    `ConfigError` if an optimizer reads whole arrays of a state that is split.
    """
    config, layout, apply = on.configuration, on.configuration.placing, on.apply
    of_micro_shard = config.mode.of_micro_shard
    if of_micro_shard is None:
        return None
    dims: tuple[ShardDim, ...] | None = None
    if on.updater.names_replicas:
        _check_whole(layout)
        apply = _of_equal_replicas(apply, on.mesh)
    if layout.splits_optimizer:
        dims = tuple(map(split_dim, jax.tree.leaves(on.of_gradient)))
        shard_dims = list(map(split_dim, jax.tree.leaves(on.shardings)))
        _check_pieces(on, apply, shard_dims, dims)

    def step(state: TrainState, batch: Batch, piece: MicroShard) -> tuple[TrainState, Metrics]:
        sums = partial(
            step_sums,
            axis=None,
            objective=on.objective,
            accumulator=of_micro_shard(piece, config.reduction, dims),
            reduce=no_reduction,
        )
        of_state = (
            apply if dims is None else by_pieces(apply, [*shard_dims, *dims], shard_dims, piece)
        )
        return update(state, batch, sums=sums, apply=of_state)

    return step


def _check_pieces(
    on: ModelOnMesh, apply: Apply, shard_dims: Sequence[ShardDim], dims: Sequence[ShardDim]
) -> None:
    """Raise `ConfigError` if updating a piece needs more than reductions over other pieces."""
    count, shapes = on.configuration.micro_shards, on.shapes

    def of_piece(number: jax.Array, state: TrainState, total: StepSums, *rest: PyTree) -> Any:
        piece = MicroShard(number, count)
        return by_pieces(apply, [*shard_dims, *dims], shard_dims, piece)(state, total, *rest)

    one: Any = jax.ShapeDtypeStruct((), jnp.float32)
    sums = jax.tree.map(partial(jax.eval_shape, to_sum), only_read(shapes.params, on.updater.read))
    any_piece, number = MicroShard(None, count), jax.ShapeDtypeStruct((), jnp.int32)
    total = StepSums(any_piece.shapes(sums, dims), {LOSS: WeightedSum(one, one)})
    state = any_piece.shapes(shapes, shard_dims)
    try:
        jax.eval_shape(of_piece, number, state, total, shapes.extras, shapes.reduction)
    except LooksAtWhole as error:
        raise ConfigError(
            f"the optimizer's {error} reads a whole array, and in a bitwise reproducible mode each "
            f"of {count} micro-shards updates one piece of arrays that the layout splits: use "
            "layout='replicated', or an optimizer of elementwise operations and norms"
        ) from error


def _of_each_replica(apply: Apply, mesh: AnyMesh, layout: Layout) -> Apply:
    """Return `apply` with the replica axis in scope; all arrays are whole."""
    _check_whole(layout)
    reduction_state = by_rows(mesh).spec
    everywhere = replicated(mesh).spec
    names = (field.name for field in dataclasses.fields(TrainState))
    where = TrainState(**{**dict.fromkeys(names, everywhere), "reduction": reduction_state})
    into = (where, everywhere, everywhere, reduction_state)
    return jax.shard_map(
        apply, mesh=mesh, in_specs=into, out_specs=(where, everywhere), check_vma=False
    )


def _of_equal_replicas(apply: Apply, mesh: AnyMesh) -> Apply:
    """Return `apply` with the replica axis in scope, of size 1 since replicas are equal."""
    axis = row_axis(mesh)
    for name in [axis] if isinstance(axis, str) else axis:
        apply = jax.vmap(apply, in_axes=None, out_axes=None, axis_name=name, axis_size=1)
    return apply


def _check_whole(layout: Layout) -> None:
    if not layout.is_whole:
        raise ConfigError(
            f"layout={layout.name!r} with an optimizer that names the replica axis, over which the "
            "layout splits arrays: use layout='replicated', or remove lax.pmean from it"
        )

"""The step that Replicax writes, on a mesh: sums of each replica, and an update of whole arrays."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.accumulate import Apply
from replicax.core.batch import Batch
from replicax.core.configuration import Configuration
from replicax.core.gathering import Gathering
from replicax.core.layout import Layout
from replicax.core.loss import LOSS, WeightedSum
from replicax.core.mesh import STAGE, AnyMesh, by_rows, replica_count, replicated, shard_axis
from replicax.core.models.definition import PyTree
from replicax.core.modes import batch_shardings
from replicax.core.objective import Objective, StepSums, only_read
from replicax.core.optimizer import Updater
from replicax.core.own_part import LooksAtWhole, by_own_part
from replicax.core.precision import to_sum
from replicax.core.reduction import parts_of
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
        ConfigError: fixed bits, the optimizer's state split, and an optimizer that reads it whole.
    """
    mode, layout, accumulator = config.mode, config.layout, config.accumulator(mesh)
    plain = partial(apply_gradient, updater=updater)
    apply = config.wrapped(plain)
    apply = unscaling(apply) if config.precision.scales else apply
    where = (shardings, batch_shardings(mesh))
    gradient: PyTree = replicated(mesh)
    parts = None
    if mode.per_replica and layout.splits_optimizer:
        gradient = only_read(layout.gradient_shardings(shapes.params, mesh), objective.read)
        parts = parts_of(gradient, mesh, summed=layout.splits_params)
    if mode.bitwise and parts is not None:
        apply, where_total = _with_fixed_bits(
            *(apply, plain, mesh, shapes, shardings, gradient, objective.read)
        )
        if where_total is not gradient:
            gradient, parts = where_total, None
    if updater.names_replicas and mode.per_replica:
        apply = _of_each_replica(apply, mesh, layout)
    sums = partial(
        step_sums,
        objective=in_place(objective, config, shardings, mesh),
        accumulator=accumulator,
        reduce=mode.reduce(config.reduction, parts),
    )
    mapped = mode.wrap(sums, mesh, where, _total(gradient, mesh))
    return partial(update, sums=mapped, apply=partial(accumulator.isolate, apply))


def _of_each_replica(apply: Apply, mesh: AnyMesh, layout: Layout) -> Apply:
    """`apply` where the axis of the replicas has its name, all arrays being whole."""
    if not layout.is_whole:
        raise ConfigError(
            f"layout={layout.name!r} and an optimizer that names the axis of the replicas, each of "
            "which has a part of its arrays: use layout='replicated', or take lax.pmean out of it"
        )
    carried = by_rows(mesh).spec
    everywhere = replicated(mesh).spec
    names = (field.name for field in dataclasses.fields(TrainState))
    where = TrainState(**{**dict.fromkeys(names, everywhere), "reduction": carried})
    into = (where, everywhere, everywhere, carried)
    return jax.shard_map(
        apply, mesh=mesh, in_specs=into, out_specs=(where, everywhere), check_vma=False
    )


def _total(gradient: PyTree, mesh: AnyMesh) -> tuple[StepSums, Any, Any]:
    """Where the results of `step_sums` lie, a gradient's total as `gradient` says."""
    weighted: Any = replicated(mesh)
    return StepSums(gradient, weighted), replicated(mesh), by_rows(mesh)


def _with_fixed_bits(
    apply: Apply,
    plain: Apply,
    mesh: AnyMesh,
    shapes: TrainState,
    shardings: TrainState,
    gradient: PyTree,
    read: tuple[bool, ...] | None,
) -> tuple[Apply, PyTree]:
    """`apply` on a split state with the bits of a whole one, and where it takes the gradient's
    total: in parts, or whole where what wraps the `plain` update looks at all of it.
    """
    one: Any = jax.ShapeDtypeStruct((), jnp.float32)
    sums = jax.tree.map(partial(jax.eval_shape, to_sum), only_read(shapes.params, read))
    arguments = shapes, StepSums(sums, {LOSS: WeightedSum(one, one)})
    out, axis = (shardings, replicated(mesh)), shard_axis(mesh)

    def in_parts(apply: Apply, where: PyTree) -> Apply:
        of_parts = by_own_part(apply, mesh, axis, (shardings, *_total(where, mesh)), out)
        jax.eval_shape(of_parts, *arguments, shapes.extras, shapes.reduction)
        return of_parts

    try:
        in_parts(plain, gradient)
    except LooksAtWhole as error:
        raise ConfigError(
            f"the optimizer's {error} reads a whole array, and in a mode with fixed bits each "
            f"of {replica_count(mesh)} replicas updates a part of what the layout splits: use "
            "layout='replicated', or an optimizer without norms and clipping"
        ) from error
    try:
        return in_parts(apply, gradient), gradient
    except LooksAtWhole:
        return in_parts(apply, replicated(mesh)), replicated(mesh)


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

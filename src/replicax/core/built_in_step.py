"""The parts of the built-in step that a layout or a mesh changes: its objective and its update."""

import dataclasses
from functools import partial

from replicax.core.config import Configuration
from replicax.core.ground.train_state import TrainState
from replicax.core.pipeline.staged_objective import Staged
from replicax.core.placement.fsdp_gather import Gathering
from replicax.core.placement.mesh import STAGE, AnyMesh, shard_axis
from replicax.core.step.base import Apply
from replicax.core.step.loss_scale import plain, unscaling
from replicax.core.step.objective import Objective
from replicax.core.step.optimizer import Updater
from replicax.core.step.update import apply_gradient


def split_objective(
    whole: Objective, config: Configuration, mesh: AnyMesh, shardings: TrainState
) -> Objective:
    """Return `whole`, a loss on whole parameters, as one on parameters that the layout splits."""
    if mesh.shape.get(STAGE, 1) > 1:
        return Staged(
            *(whole.definition, whole.loss, whole.precision, whole.read),
            mesh=mesh,
            shardings=shardings.params,
            micro_batches=config.accumulate,
            schedule=config.layout.schedule,
        )
    if not config.layout.splits_params:
        return whole
    gathering = Gathering(shardings.params, shard_axis(mesh), config.mode.per_replica)
    return dataclasses.replace(whole, gathering=gathering)


def optimizer_update(config: Configuration, updater: Updater) -> Apply:
    """Return the optimizer part of the step, wrapped as configured, with its loss scale undone."""
    apply = config.wrapped(partial(apply_gradient, updater=updater))
    if not config.precision.scales:
        return apply
    return unscaling(apply) if config.wrap_apply is not None else plain(unscaling(apply))

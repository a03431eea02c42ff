"""The state before the first step."""

import dataclasses

import jax
import jax.numpy as jnp

from replicax.core.config import Configuration
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState, Uncompared
from replicax.core.ground.vectors import size_in_blocks
from replicax.core.models.definition import Definition
from replicax.core.placement.mesh import AnyMesh, replica_count
from replicax.core.rounds.arithmetic import arithmetic_of
from replicax.core.step.loss_scale import first_scale
from replicax.core.step.objective import only_read
from replicax.core.step.optimizer import Updater


def create_state(
    configuration: Configuration,
    mesh: AnyMesh,
    updater: Updater,
    definition: Definition,
    params: PyTree,
    extras: PyTree,
    seed: jax.Array,
) -> TrainState:
    """Create the state before the first step."""
    replicas, islands = replica_count(mesh), configuration.islands
    of_one = configuration.reduction.init(only_read(params, updater.read))
    state = TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=updater.optimizer.init(params),
        extras=extras,
        seed=jnp.uint32(seed),
        reduction=jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf, (replicas, *leaf.shape)), of_one
        ),
        scale=first_scale() if configuration.precision.scales else (),
        definition=Uncompared(definition),
    )
    if islands is None:
        return state
    if islands.sends_gradients:
        read = only_read(params, updater.read)
        return dataclasses.replace(state, islands=jnp.zeros(size_in_blocks(jax.tree.leaves(read))))
    count = None if islands.axis is None else replicas
    return arithmetic_of(islands, updater, params).outer(state, count)

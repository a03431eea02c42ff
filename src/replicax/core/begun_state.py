"""The state before the first step, and one that another `DataParallel` made."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.between.arithmetic import arithmetic_of
from replicax.core.config import Configuration
from replicax.core.first_step.argument_checks import check_kind, check_shapes, lies_elsewhere
from replicax.core.ground.leaves import PyTree
from replicax.core.ground.train_state import TrainState, Uncompared
from replicax.core.ground.vectors import size_in_blocks
from replicax.core.models.definition import Definition
from replicax.core.placement.mesh import AnyMesh, replica_count
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


def placed_as(state: TrainState, abstract: TrainState) -> TrainState:
    """Return a state of any `DataParallel` with the shardings of `abstract`, which describes it.

    The losses that the guard of a run compares are left out if nothing reads them. Arrays that
    span processes stay where they are. `StateError` if the shapes differ.
    """
    check_kind(state)
    if not jax.tree.leaves(abstract.losses):
        state = dataclasses.replace(state, losses=())
    check_shapes(state, abstract)
    leaves, wanted = jax.tree.leaves(state), jax.tree.leaves(abstract)
    if any(map(lies_elsewhere, leaves, wanted)) and all(map(_is_at_hand, leaves)):
        state = jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, abstract))
    return state


def _is_at_hand(leaf: Any) -> bool:
    return getattr(leaf, "is_fully_addressable", True)

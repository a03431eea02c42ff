"""Five ways to run one function of a replica's view on a mesh.

| mode      | lift                   | the function sees                                   |
|-----------|------------------------|-----------------------------------------------------|
| single    | jit on one device      | the whole batch                                     |
| jit       | jit with shardings     | the whole batch; the compiler splits the work       |
| shard_map | jit of jax.shard_map   | one replica's rows, and the axis to reduce over     |
| exact     | the same               | the same; what it sums, it sums in a fixed order    |
| pmap      | jit of jax.pmap        | the same as shard_map's, through the classic API    |
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from replicax.core.accumulate import Running, Summation
from replicax.core.batch import Batch
from replicax.core.exact import Canonical
from replicax.core.mesh import DATA, AnyMesh, by_rows, is_data_only, replica_count
from replicax.core.threads import check_threads
from replicax.core.update import TrainState
from replicax.errors import ConfigError, did_you_mean

MODES = ("single", "jit", "shard_map", "pmap", "exact")
PER_REPLICA = ("shard_map", "pmap", "exact")

ReplicaFunction = Callable[[TrainState, Batch, str | None], Any]
Lifted = Callable[[TrainState, Batch], Any]


def check_mode(mode: str, mesh: Mesh) -> None:
    """Raise `ConfigError` where there is no such mode, or `mesh` is not one for it."""
    if mode not in MODES:
        raise ConfigError(
            f"mode={mode!r}; it is one of {', '.join(MODES)}{did_you_mean(mode, MODES)}"
        )
    if mode == "single" and mesh.devices.size > 1:
        raise ConfigError(
            f"mode='single' with a mesh of {mesh.devices.size} devices; it runs on 1: use "
            "mode='jit', or a mesh of one device"
        )
    if mode == "pmap" and jax.process_count() > 1:
        raise ConfigError(
            f"mode='pmap' on {jax.process_count()} processes; it knows the devices of one: use "
            "mode='shard_map', which computes the same"
        )
    if mode in PER_REPLICA and not is_data_only(mesh):
        raise ConfigError(
            f"mode={mode!r} with a mesh of {mesh.devices.size} devices and {replica_count(mesh)} "
            "replicas; there each device holds a whole replica: use mode='jit'"
        )


def summation_for(mode: str, accumulate: int, micro_shards: int, mesh: Mesh) -> Summation:
    """The one of a mode.

    Args:
        mode: one of `MODES`.
        accumulate: micro-batches of each replica; in `exact` the least.
        micro_shards: of `Canonical`.
        mesh: the devices.

    Raises:
        ConfigError: a mesh that cannot share out the micro-shards, or a CPU on which their number
            does not fix the bits.
    """
    if mode != "exact":
        return Running(accumulate)
    canonical, replicas = Canonical(micro_shards), replica_count(mesh)
    own = canonical.micro_batches(replicas)
    if own < accumulate:
        raise ConfigError(
            f"mode='exact' with accumulate={accumulate} on {replicas} replicas and "
            f"micro_shards={micro_shards}; each replica has {own} of them: raise micro_shards to "
            f"{accumulate * replicas}"
        )
    check_threads(mesh, micro_shards)
    return canonical


def lift(
    function: ReplicaFunction,
    mode: str,
    mesh: AnyMesh,
    state: Any,
    out: Any,
    *,
    donate: bool = False,
) -> Any:
    """`function` compiled for `mesh`, as a `jax.jit` function of a state and a global batch.

    Args:
        function: takes a state, a batch, and the replica axis's name or None; what it returns
            has no row dim, and is equal on all replicas.
        mode: one of `MODES`.
        mesh: the devices; for pmap, attached or described ones.
        state: shardings of the state.
        out: shardings of what `function` returns, or one for all of it.
        donate: whether the state's memory is given to the result.
    """
    views: dict[str, Callable[[ReplicaFunction, Any], Lifted]] = {
        "single": _global_view,
        "jit": _global_view,
        "shard_map": _shard_map,
        "pmap": _pmap,
        "exact": _shard_map,
    }
    return jax.jit(
        views[mode](function, mesh),
        in_shardings=(state, by_rows(mesh)),
        out_shardings=out,
        donate_argnums=0 if donate else (),
    )


def _global_view(function: ReplicaFunction, _mesh: AnyMesh) -> Lifted:
    return lambda state, batch: function(state, batch, None)


def _shard_map(function: ReplicaFunction, mesh: AnyMesh) -> Lifted:
    # With check_vma=True a model's own scan from zeros (any RNN) is a type error, and parameters
    # must be cast to varying lest their gradient come out N times too large. Without it, the
    # gradient of a replica's sum is local, and the one reduction of `update` is all there is.
    return jax.shard_map(
        lambda state, batch: function(state, batch, DATA),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(DATA)),
        out_specs=PartitionSpec(),
        check_vma=False,
    )


def _pmap(function: ReplicaFunction, mesh: Mesh) -> Lifted:
    replicas = replica_count(mesh)
    mapped = jax.pmap(
        lambda state, batch: function(state, batch, DATA),
        axis_name=DATA,
        in_axes=(None, 0),
        out_axes=None,
        devices=list(mesh.devices.flat),
    )

    def stack(leaf: jax.Array) -> jax.Array:
        return leaf.reshape(replicas, leaf.shape[0] // replicas, *leaf.shape[1:])

    return lambda state, batch: mapped(state, jax.tree.map(stack, batch))

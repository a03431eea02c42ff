"""Named device meshes."""

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from replicax.core.data.batch import Batch
from replicax.core.ground.job import Job
from replicax.errors import ConfigError
from replicax.known_wrong.avoidance import avoiding
from replicax.text.arguments import typed

DATA, FSDP, MODEL, STAGE = "data", "fsdp", "model", "stage"
"""Names of mesh axes; replicas are laid out along `data`, and `fsdp` if there is one."""

_OUTERMOST_FIRST = (DATA, FSDP, STAGE)

Axis = str | tuple[str, ...]
"""One axis or several, as `jax.lax.psum` takes them."""

AnyMesh = Mesh | AbstractMesh
"""A mesh of attached or described devices, or one that has only their number."""

MeshKind = TypeVar("MeshKind", Mesh, AbstractMesh, AnyMesh)

ShardDim = int | None
"""The dim of a global array along which the parts of the devices are concatenated: 0 for scalars,
which then have shape `[devices]`. None for an array that is equal on all devices."""


def platform_of(mesh: AnyMesh) -> str:
    """Return the platform of a mesh's devices; empty if it has only their number."""
    return str(mesh.devices.flat[0].platform) if isinstance(mesh, Mesh) else ""


def options_on(mesh: AnyMesh) -> dict[str, Any]:
    """Return the compiler options of every program on `mesh`: they avoid known wrong numbers."""
    return avoiding(platform_of(mesh))


@typed
def make_mesh(
    data: int = -1,
    model: int = 1,
    stage: int = 1,
    devices: Sequence[jax.Device] | None = None,
    *,
    fsdp: int = 1,
) -> Mesh:
    """Create a mesh with the axes `data`, `model` and `stage`, and `fsdp` if it is more than 1.

    Devices along `model`, which communicate most, are neighbours, then those along `stage`, then
    `fsdp`; `data` is outermost and spans hosts.

    Examples:
        >>> mesh = rx.make_mesh(model=2, devices=jax.devices()[:8])
        >>> mesh.shape["data"], mesh.shape["model"]
        (4, 2)

    Args:
        data: number of replicas. -1 uses all devices not taken by the other axes.
        model: devices that each layer of a replica is split over.
        stage: devices that the layers of a replica are distributed over.
        devices: the devices to use, in order; by default all attached devices.
        fsdp: replicas, in each of the `data` groups, that a sharded state is split over (hybrid
            sharding). 1 splits over `data`.

    Raises:
        ConfigError: more devices are requested than exist, or an axis does not divide them.
    """
    attached = devices is None
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ConfigError("devices=[] has 0 devices; a mesh needs at least 1: pass some")
    inner = {FSDP: fsdp, MODEL: model, STAGE: stage}
    if data == -1 and min(inner.values()) > 0:
        data, remainder = divmod(len(devices), math.prod(inner.values()))
        if remainder:
            axes = " x ".join(f"{name}={size}" for name, size in inner.items() if size > 1)
            raise ConfigError(
                f"{len(devices)} devices over {axes} leave a remainder; the product "
                f"{math.prod(inner.values())} must divide the devices: change the axes"
            )
    for name, size in {**inner, DATA: data}.items():
        if size < 1:
            raise ConfigError(f"{name}={size}; an axis needs at least 1 device: increase it")
    needed = data * math.prod(inner.values())
    if needed > len(devices):
        raise ConfigError(
            f"{needed} devices requested and {len(devices)} attached ({devices[0].platform}); "
            f"use at most {len(devices)}{_more_host_devices(devices[0], needed)}"
        )
    taken = _of_every_process(devices, needed) if attached else devices[:needed]
    return mesh_of(taken, _sizes(data, model, stage, fsdp))


def abstract_mesh(data: int, model: int = 1, stage: int = 1, *, fsdp: int = 1) -> AbstractMesh:
    """Return the mesh `make_mesh` would create for these sizes; its devices need not exist."""
    return _abstract(_sizes(data, model, stage, fsdp))


def abstract_like(mesh: AnyMesh, devices: int, **changed: int) -> AbstractMesh:
    """Return a mesh like `mesh` with other axis sizes; `data` takes the remaining devices.

    The devices need not exist. `ConfigError` if the other axes do not divide `devices`.
    """
    inner = {**mesh.shape, **changed}
    del inner[DATA]
    rest = math.prod(inner.values())
    if devices % rest:
        axes = " x ".join(f"{axis}={size}" for axis, size in inner.items() if size > 1)
        raise ConfigError(
            f"{devices} devices over {axes}; the product {rest} must divide the devices: change "
            "the axes or the number of devices"
        )
    return _abstract({DATA: devices // rest, **inner})


def mesh_of(devices: Sequence[Any], sizes: Mapping[str, int]) -> Mesh:
    """Return the mesh of these devices with axes of these sizes, in order."""
    return Mesh(in_order(devices, sizes), tuple(sizes))


def in_order(devices: Sequence[Any], sizes: Mapping[str, int]) -> np.ndarray:
    """Return devices as an array `[*sizes]`, neighbours communicating most; see `make_mesh`."""
    outer = [axis for axis in _OUTERMOST_FIRST if axis in sizes]
    axes = [*outer, *(axis for axis in sizes if axis not in outer)]
    placed = np.asarray(devices).reshape([sizes[axis] for axis in axes])
    return placed.transpose([axes.index(axis) for axis in sizes])


def _sizes(data: int, model: int, stage: int, fsdp: int) -> dict[str, int]:
    hybrid = {FSDP: fsdp} if fsdp > 1 else {}
    return {DATA: data, **hybrid, MODEL: model, STAGE: stage}


def _abstract(sizes: Mapping[str, int]) -> AbstractMesh:
    automatic = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic)


def check_mesh(mesh: MeshKind) -> MeshKind:
    """Return `mesh` with automatic axis types; raise `ConfigError` if it has no `data` axis."""
    if DATA not in mesh.axis_names:
        named = (DATA, *mesh.axis_names[1:])
        raise ConfigError(
            f"the mesh has the axes {', '.join(mesh.axis_names)} and none named 'data', the axis "
            f"of the replicas: rename it, as in jax.sharding.Mesh(mesh.devices, {named}), or use "
            "rx.make_mesh()"
        )
    if isinstance(mesh, AbstractMesh):
        return _abstract(mesh.shape)
    return Mesh(mesh.devices, mesh.axis_names)


def check_processes(mesh: Mesh, job: Job) -> None:
    """Raise `ConfigError` if the processes of `job` cannot compute together on `mesh`."""
    count = jax.process_count()
    if job.processes != count:
        raise ConfigError(
            f"JAX runs in {count} processes and the job has {job.processes}; Replicax must check "
            "that all agree and that none is stuck: call rx.initialize() first"
        )
    if count == 1:
        return
    owned = collections.Counter(device.process_index for device in mesh.devices.flat)
    if len(owned) < count or len(set(owned.values())) > 1:
        shares = ", ".join(f"{owned[process]} of process {process}" for process in range(count))
        raise ConfigError(
            f"the mesh has {shares}; each of {count} processes must contribute the same number of "
            "devices: use all devices, or the same number from each"
        )


def row_axis(mesh: AnyMesh) -> Axis:
    """Return the axis or axes that the rows of a batch are split over."""
    return (DATA, FSDP) if FSDP in mesh.axis_names else DATA


def shard_axis(mesh: AnyMesh) -> str:
    """Return the axis that `zero1` and `fsdp` split a state over."""
    return FSDP if FSDP in mesh.axis_names else DATA


def replica_count(mesh: AnyMesh) -> int:
    """Return the number of replicas: the devices along the row axes."""
    return int(mesh.shape[DATA] * mesh.shape.get(FSDP, 1))


def numbers_on(axis: Axis | None, rows: int, part: tuple[Any, int] = (0, 1)) -> jax.Array:
    """Return int32 `[rows]`: the numbers in the whole batch of so many rows on a replica.

    `part`: which of how many micro-batches has them, as `accumulate.split_rows` splits.
    """
    number, parts = part
    first = 0 if axis is None else lax.axis_index(axis) * rows * parts
    found: jax.Array = first + number + parts * jnp.arange(rows, dtype=jnp.int32)
    return found


def is_data_only(mesh: AnyMesh) -> bool:
    """Whether each replica is on one device."""
    return replica_count(mesh) == mesh.size


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Return the sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: AnyMesh) -> NamedSharding:
    """Return the sharding of an array whose leading dim is split over the replicas."""
    return NamedSharding(mesh, PartitionSpec(row_axis(mesh)))


def split_dim(sharding: NamedSharding) -> int | None:
    """Return the first dim of an array that a sharding splits, if any."""
    return next((dim for dim, axes in enumerate(sharding.spec) if axes), None)


def batch_shardings(mesh: AnyMesh) -> Batch:
    """Return the shardings of a batch: rows split over the replicas, shared leaves replicated."""
    rows = by_rows(mesh)
    found = Batch(rows, rows, rows, shared=replicated(mesh), sets=rows, count=rows)  # type: ignore[arg-type]
    return found


def sharding_of(mesh: Mesh, own: ShardDim) -> NamedSharding:
    """Return the sharding on `mesh` of an array split by device along a dim, or replicated."""
    spec = PartitionSpec() if own is None else PartitionSpec(*[None] * own, row_axis(mesh))
    return NamedSharding(mesh, spec)


def _of_every_process(devices: Sequence[jax.Device], needed: int) -> list[jax.Device]:
    """Return the first devices, the same number from each process."""
    count = jax.process_count()
    if needed % count:
        raise ConfigError(
            f"{needed} devices on {count} processes leave a remainder; each must contribute the "
            f"same number: use a multiple of {count}"
        )
    own = needed // count
    return [d for p in range(count) for d in [d for d in devices if d.process_index == p][:own]]


def _more_host_devices(device: jax.Device, needed: int) -> str:
    if device.platform != "cpu":
        return ", or JAX_PLATFORMS=cpu for simulated CPU devices"
    return f", or set JAX_NUM_CPU_DEVICES={needed} for more simulated CPU devices"

"""Devices -> a named mesh."""

import collections
from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from replicax.core.job import Job
from replicax.errors import ConfigError

DATA = "data"
"""The mesh axis whose devices hold one replica each."""

AXES = (DATA, "model", "stage")

AnyMesh = Mesh | AbstractMesh
"""Of devices, attached or described, or of their number alone."""

MeshKind = TypeVar("MeshKind", Mesh, AbstractMesh, AnyMesh)


def make_mesh(
    data: int = -1, model: int = 1, stage: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh with the axes `data`, `model` and `stage`.

    Args:
        data: replicas. -1 takes all devices that the other axes leave.
        model: devices that share each layer of one replica.
        stage: devices that each hold some layers of one replica.
        devices: the devices to use, in order; all attached ones by default.

    Raises:
        ConfigError: more devices asked for than there are, or an axis that does not divide them.
    """
    attached = devices is None
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ConfigError("devices=[] has 0 devices; a mesh has at least 1: name some")
    if data == -1 and min(model, stage) > 0:
        data, remainder = divmod(len(devices), model * stage)
        if remainder:
            raise ConfigError(
                f"{len(devices)} devices over model={model} x stage={stage} leaves a remainder; "
                f"the product {model * stage} must divide the devices: change the axes"
            )
    for name, size in {"model": model, "stage": stage, "data": data}.items():
        if size < 1:
            raise ConfigError(f"{name}={size}; an axis has at least 1 device: raise it")
    needed = data * model * stage
    if needed > len(devices):
        raise ConfigError(
            f"{needed} devices asked for and {len(devices)} attached ({devices[0].platform}); "
            f"use at most {len(devices)}{_more_host_devices(devices[0], needed)}"
        )
    taken = _of_every_process(devices, needed) if attached else devices[:needed]
    return Mesh(np.asarray(taken).reshape(data, model, stage), AXES)


def abstract_mesh(data: int) -> AbstractMesh:
    """As `make_mesh(data)`, of devices that need not exist."""
    return AbstractMesh((data, 1, 1), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_mesh(mesh: MeshKind) -> MeshKind:
    """Return `mesh` with automatic axis types; raise `ConfigError` where it has no `data` axis."""
    if DATA not in mesh.axis_names:
        raise ConfigError(
            f"the mesh has the axes {', '.join(mesh.axis_names)} and none named 'data'; replicas "
            "lie along 'data': rename an axis or use rx.make_mesh()"
        )
    if isinstance(mesh, AbstractMesh):
        automatic = (AxisType.Auto,) * len(mesh.axis_names)
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=automatic)
    return Mesh(mesh.devices, mesh.axis_names)


def check_processes(mesh: Mesh, job: Job) -> None:
    """Raise `ConfigError` where the processes of `job` cannot compute together on `mesh`."""
    count = jax.process_count()
    if job.processes != count:
        raise ConfigError(
            f"JAX runs in {count} processes and the job has {job.processes}; Replicax checks that "
            "all agree and that none is stuck: hand in job=rx.initialize()"
        )
    if count == 1:
        return
    owned = collections.Counter(device.process_index for device in mesh.devices.flat)
    if len(owned) < count or len(set(owned.values())) > 1:
        shares = ", ".join(f"{owned[process]} of process {process}" for process in range(count))
        raise ConfigError(
            f"the mesh has {shares}; each of {count} processes takes part with as many devices: "
            "use all devices, or as many of each"
        )


def replica_count(mesh: AnyMesh) -> int:
    """Replicas of the mesh: the size of its `data` axis."""
    return int(mesh.shape[DATA])


def is_data_only(mesh: AnyMesh) -> bool:
    """Whether every device holds a replica of its own."""
    return replica_count(mesh) == mesh.size


def replicated(mesh: AnyMesh) -> NamedSharding:
    """The sharding of an array of which every device holds a copy."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: AnyMesh) -> NamedSharding:
    """The sharding of an array whose leading dim is split over the replicas."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def _of_every_process(devices: Sequence[jax.Device], needed: int) -> list[jax.Device]:
    """The first devices, as many of each process."""
    count = jax.process_count()
    if needed % count:
        raise ConfigError(
            f"{needed} devices on {count} processes leaves a remainder; each takes part with as "
            f"many: use a multiple of {count}"
        )
    own = needed // count
    return [d for p in range(count) for d in [d for d in devices if d.process_index == p][:own]]


def _more_host_devices(device: jax.Device, needed: int) -> str:
    if device.platform != "cpu":
        return ", or JAX_PLATFORMS=cpu for host devices"
    return f", or start with JAX_NUM_CPU_DEVICES={needed} for more host devices"

"""Devices -> a named mesh."""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from replicax.errors import ConfigError

DATA = "data"
"""The mesh axis whose devices hold one replica each."""


def make_mesh(
    data: int = -1,
    model: int = 1,
    stage: int = 1,
    devices: Sequence[jax.Device] | None = None,
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
    devices = jax.devices() if devices is None else list(devices)
    for name, size in (("model", model), ("stage", stage)):
        if size < 1:
            raise ConfigError(f"{name}={size}; an axis has at least 1 device: raise it")
    if not devices:
        raise ConfigError("devices=[] has 0 devices; a mesh has at least 1: name some")
    others = model * stage
    if data == -1:
        if len(devices) % others:
            raise ConfigError(
                f"{len(devices)} devices over model={model} x stage={stage} leaves a remainder; "
                f"the product {others} must divide the devices: change the axes"
            )
        data = len(devices) // others
    if data < 1:
        raise ConfigError(f"data={data}; a mesh has at least 1 replica, or -1 for all: raise it")
    needed = data * others
    if needed > len(devices):
        raise ConfigError(
            f"{needed} devices asked for and {len(devices)} attached ({devices[0].platform}); "
            f"use at most {len(devices)}{_more_host_devices(devices[0], needed)}"
        )
    grid = np.asarray(devices[:needed]).reshape(data, model, stage)
    return Mesh(grid, (DATA, "model", "stage"))


def check_mesh(mesh: Mesh) -> Mesh:
    """`mesh` with automatic axis types.

    Raises:
        ConfigError: the mesh has no `data` axis.
    """
    if DATA not in mesh.axis_names:
        raise ConfigError(
            f"the mesh has the axes {', '.join(mesh.axis_names)} and none named 'data'; replicas "
            "lie along 'data': rename an axis or use rx.make_mesh()"
        )
    return Mesh(mesh.devices, mesh.axis_names)


def replica_count(mesh: Mesh) -> int:
    """Replicas of the mesh: the size of its `data` axis."""
    return int(mesh.shape[DATA])


def is_data_only(mesh: Mesh) -> bool:
    """Whether every device of the mesh holds a replica of its own."""
    return replica_count(mesh) == math.prod(mesh.devices.shape)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array of which every device holds a copy."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """The sharding of an array whose leading dim is split over the replicas."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def _more_host_devices(device: jax.Device, needed: int) -> str:
    if device.platform != "cpu":
        return ", or JAX_PLATFORMS=cpu for host devices"
    return f", or start with JAX_NUM_CPU_DEVICES={needed} for more host devices"

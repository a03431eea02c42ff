"""Whether a train state, and then a compiled step, fits into the memory that is free."""

import math
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from replicax.analysis.compiled import inspect
from replicax.errors import ConfigError

GIB = 2**30


def check_state_fits(state: Any, mesh: Mesh) -> None:
    """Raise where a train state needs more memory than there is, before it is placed.

    Args:
        state: shapes with shardings.
        mesh: whose devices it is for.

    Raises:
        ConfigError: it cannot fit.
    """
    free = _free_bytes(mesh)
    each = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    needed = _sharing(mesh) * each
    if free is not None and needed > free:
        raise ConfigError(
            f"the training state needs {needed / GIB:.1f} GiB{_where(mesh)}, and "
            f"{free / GIB:.1f} GiB are free: train a smaller model, or split it with layout fsdp"
        )


def check_fits(compiled: jax.stages.Compiled, mesh: Mesh, rows: int) -> None:
    """Raise where a step needs more memory than there is, before it is run.

    Args:
        compiled: the step; its arguments are in memory already.
        mesh: whose devices it runs on.
        rows: of the global batch.

    Raises:
        ConfigError: it cannot fit.
    """
    memory = inspect(compiled).memory
    free = _free_bytes(mesh)
    if memory is None or free is None:
        return
    needed = _sharing(mesh) * (memory.peak - memory.arguments)
    if needed > free:
        raise ConfigError(
            f"a step of {rows} rows needs {needed / GIB:.1f} GiB{_where(mesh)} beside the training "
            f"state, and {free / GIB:.1f} GiB are free: lower the batch size, or raise accumulate"
        )


def _sharing(mesh: Mesh) -> int:
    """Devices that share one memory."""
    devices = mesh.local_devices
    return len(devices) if devices[0].platform == "cpu" else 1


def _where(mesh: Mesh) -> str:
    sharing = _sharing(mesh)
    return f" on {sharing} host devices together" if sharing > 1 else " on a device"


def _free_bytes(mesh: Mesh) -> int | None:
    """On the device that has the least; of the host, for host devices. None where nobody tells."""
    devices = mesh.local_devices
    if devices[0].platform == "cpu":
        return _free_host_bytes()
    stats = [device.memory_stats() or {} for device in devices]
    known = [each["bytes_limit"] - each["bytes_in_use"] for each in stats if "bytes_limit" in each]
    return min(known, default=None)


def _free_host_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":") for line in lines)
    available = sizes.get("MemAvailable", "").split()
    return int(available[0]) * 1024 if available else None

"""Whether a compiled step fits into the memory that is free."""

from pathlib import Path

import jax
from jax.sharding import Mesh

from replicax.errors import ConfigError
from replicax.parallel.compiled import inspect

GIB = 2**30


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
    device = mesh.local_devices[0]
    sharing = len(mesh.local_devices) if device.platform == "cpu" else 1
    needed = sharing * (memory.peak - memory.arguments)
    if needed > free:
        each = f" on {sharing} host devices together" if sharing > 1 else " on a device"
        raise ConfigError(
            f"a step of {rows} rows needs {needed / GIB:.1f} GiB{each} beside the training state, "
            f"and {free / GIB:.1f} GiB are free: lower the batch size, or raise accumulate"
        )


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

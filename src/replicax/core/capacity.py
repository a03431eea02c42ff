"""Whether a train state, and then a compiled step, fits into the memory that is free."""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from replicax.errors import ConfigError

GIB = 2**30


def check_state_fits(state: Any, mesh: Mesh) -> None:
    """Raise `ConfigError` where `state`, shapes with shardings, cannot be placed on `mesh`."""
    each = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    fix = "train a smaller model, or split it with layout fsdp"
    _check(each, mesh, "the training state", "", fix)


def check_fits(programs: Sequence[Any], mesh: Mesh, rows: int) -> None:
    """Raise `ConfigError` where a step of `rows`, its arguments placed, cannot be run on `mesh`.

    What each of its `programs` returns is held to its end, and temporaries by one at a time.
    """
    stats = [program.memory_analysis() for program in programs]
    if None in stats:
        return
    held = sum(each.output_size_in_bytes - each.alias_size_in_bytes for each in stats)
    needed = held + max(each.temp_size_in_bytes for each in stats)
    if mesh.local_devices[0].platform == "tpu":  # whose temporaries share memory over time
        needed = max(each.peak_memory_in_bytes - each.argument_size_in_bytes for each in stats)
    fix = "lower the batch size, or raise accumulate"
    _check(needed, mesh, f"a step of {rows} rows", " beside the training state", fix)


def _check(each: int, mesh: Mesh, what: str, beside: str, fix: str) -> None:
    """Raise where `each` bytes on every device are more than there are."""
    sharing = len(mesh.local_devices) if mesh.local_devices[0].platform == "cpu" else 1
    free = _free_bytes(mesh)
    if free is not None and sharing * each > free:
        where = f" on {sharing} host devices together" if sharing > 1 else " on a device"
        raise ConfigError(
            f"{what} needs {sharing * each / GIB:.1f} GiB{where}{beside}, and {free / GIB:.1f} GiB "
            f"are free: {fix}"
        )


def _free_bytes(mesh: Mesh) -> int | None:
    """On the device that has the least; of the host, for host devices. None where nobody tells."""
    if mesh.local_devices[0].platform == "cpu":
        return free_host_bytes()
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    known = [each["bytes_limit"] - each["bytes_in_use"] for each in stats if "bytes_limit" in each]
    return min(known, default=None)


def free_host_bytes() -> int | None:
    """Memory that this host has left; None where the system does not tell."""
    path = Path("/proc/meminfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    available = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(available[1]) * 1024 if available else None

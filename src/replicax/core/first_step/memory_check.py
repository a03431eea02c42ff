"""Check that a train state, and then a compiled step, fits in free memory."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from replicax.core.placement.layout import bytes_per_device
from replicax.errors import ConfigError

GIBIBYTE = 2**30


def check_state_fits(state: Any, mesh: Mesh) -> None:
    """Raise `ConfigError` if `state`, shapes with shardings, does not fit on `mesh`."""
    each = bytes_per_device(jax.tree.leaves(state))
    fix = "train a smaller model, or shard it with layout fsdp"
    _check(each, mesh, "the training state", "", fix)


def check_fits(programs: Sequence[Any], mesh: Mesh, rows: int) -> None:
    """Raise `ConfigError` if a step of `rows`, its arguments placed, does not fit on `mesh`.

    The outputs of all its `programs` are kept until it ends, temporaries by one program at a time.
    """
    stats = [program.memory_analysis() for program in programs]
    if None in stats:
        return
    held = sum(each.output_size_in_bytes - each.alias_size_in_bytes for each in stats)
    needed = held + max(each.temp_size_in_bytes for each in stats)
    if mesh.local_devices[0].platform == "tpu":  # temporaries share memory over time
        needed = max(each.peak_memory_in_bytes - each.argument_size_in_bytes for each in stats)
    fix = "lower the batch size, or raise accumulate"
    _check(needed, mesh, f"a step of {rows} rows", " beside the training state", fix)


def _check(each: int, mesh: Mesh, what: str, beside: str, fix: str) -> None:
    """Raise if `each` bytes per device exceed the free memory."""
    sharing = len(mesh.local_devices) if mesh.local_devices[0].platform == "cpu" else 1
    free = _free_bytes(mesh)
    if free is not None and sharing * each > free:
        where = f" on {sharing} host devices in total" if sharing > 1 else " per device"
        raise ConfigError(
            f"{what} needs {sharing * each / GIBIBYTE:.1f} GiB{where}{beside}, but only "
            f"{free / GIBIBYTE:.1f} GiB are free: {fix}"
        )


def _free_bytes(mesh: Mesh) -> int | None:
    """Return the least free memory of any device, or the host's for CPUs; None if unknown."""
    if mesh.local_devices[0].platform == "cpu":
        return free_host_bytes()
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    known = [each["bytes_limit"] - each["bytes_in_use"] for each in stats if "bytes_limit" in each]
    return min(known, default=None)


def free_host_bytes() -> int | None:
    """Return the free memory of this host; None if the system does not report it."""
    path = Path("/proc/meminfo")
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    available = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)
    return int(available[1]) * 1024 if available else None

"""The cores of this machine, dealt out to processes."""

import os
from pathlib import Path

from replicax.errors import ConfigError

TOPOLOGY = Path("/sys/devices/system/cpu")


def core_blocks(processes: int) -> list[tuple[int, ...]]:
    """Equally many cores for each process; neighbours, so that threads of one core stay together.

    Raises:
        ConfigError: more processes than cores, or a system that binds nothing to cores.
    """
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigError("--pin on a system that binds no process to cores: leave it out")
    cores = sorted(os.sched_getaffinity(0), key=lambda core: (_physical(core), core))
    if processes > len(cores):
        raise ConfigError(
            f"--pin with --processes {processes} on {len(cores)} cores; each process needs a core: "
            f"use at most {len(cores)} processes, or leave --pin out"
        )
    size = len(cores) // processes
    return [tuple(cores[size * each : size * (each + 1)]) for each in range(processes)]


def _physical(core: int) -> int:
    """The first thread of the physical core that `core` is a thread of."""
    path = TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
    try:
        return int(path.read_text(encoding="ascii").replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return core

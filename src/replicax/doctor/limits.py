"""What the system allows this process, and how it manages memory."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path

from replicax.cluster.accelerators import list_gpus
from replicax.doctor.row import OK, WARNING, Row

CHECK = "limits"
LEAST_FILES = 1024
LEAST_SHARED_BYTES = 10**9
_MALLOC = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")


def check_limits(env: Mapping[str, str]) -> list[Row]:
    """Open files, shared memory, and glibc's settings."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    shared = _shared_bytes()
    return judge_limits(files, most, shared, bool(list_gpus()), env)


def judge_limits(
    files: int, most_files: int, shared_bytes: int | None, has_gpus: bool, env: Mapping[str, str]
) -> list[Row]:
    """One row with the limits, and one for each that is too low.

    Args:
        files: that this process may have open; -1 for any number.
        most_files: to which it may raise that itself; -1 for any number.
        shared_bytes: size of /dev/shm; None where there is none.
        has_gpus: whether this host has GPUs, whose communication takes shared memory.
        env: the environment.
    """
    unlimited = resource.RLIM_INFINITY
    parts = ["any number of open files" if files == unlimited else f"{files:,} open files"]
    if shared_bytes is not None:
        parts.append(f"/dev/shm {shared_bytes / 1e9:,.1f} GB")
    tuned = [f"{name}={env[name]}" for name in _MALLOC if name in env]
    parts.append(f"malloc {', '.join(tuned) if tuned else 'as usual'}")
    note = "" if tuned else " (on CPUs, replicax train and bench tune it)"
    figures = {"open_files": files, "shared_bytes": shared_bytes, "malloc": tuned}
    rows = [Row(CHECK, f"{' · '.join(parts)}{note}", OK, figures=figures)]
    if files != unlimited and files < LEAST_FILES:
        highest = "" if most_files == unlimited else f"; {most_files:,} is the most allowed"
        text = f"{files:,} open files are few for data loaders and many processes{highest}"
        rows.append(Row(CHECK, text, WARNING, "ulimit -n 65536 before the start"))
    if has_gpus and shared_bytes is not None and shared_bytes < LEAST_SHARED_BYTES:
        text = f"/dev/shm has {shared_bytes / 1e6:,.0f} MB; NCCL needs more between GPUs of a host"
        rows.append(Row(CHECK, text, WARNING, "start the container with --shm-size=8g"))
    return rows


def _shared_bytes() -> int | None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return None
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize

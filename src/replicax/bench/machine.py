"""The measuring machine: its cores, those this process may use, and load from other processes."""

import contextlib
import datetime
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from replicax.cluster.alike import processor
from replicax.errors import ConfigError

_THREADS = Path("/proc/self/task")
CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
STATISTICS = Path("/proc/stat")


def check_cores(what: str, count: int) -> None:
    """Raise `ConfigError` if `count` devices or processes cannot each have their own core."""
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"{what} on {sys.platform}; pinning to cores needs Linux: leave it out")
    cores = len(own_cores())
    if count > cores:
        raise ConfigError(
            f"{what} on {cores} cores; each needs its own core: use at most {cores}, or leave it "
            "out"
        )


def core_count() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def own_cores() -> list[int]:
    """List the cores this thread may use, one per physical core before their second threads."""
    cores = sorted(os.sched_getaffinity(0))
    siblings: dict[str, int] = {}
    turn = {}
    for core in cores:
        physical = _physical(core)
        turn[core] = siblings[physical] = siblings.get(physical, -1) + 1
    return sorted(cores, key=lambda core: (turn[core], core))


@contextlib.contextmanager
def only_cores(cores: Sequence[int]) -> Generator[None]:
    """Restrict every thread of this process to `cores` inside the block."""
    everywhere, before = os.sched_getaffinity(0), {}
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            before[thread] = os.sched_getaffinity(thread)

    def move(thread: int, cores: Iterable[int]) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(thread, cores)

    try:
        for thread in before:
            move(thread, cores)
        yield
    finally:
        for thread in _threads():  # including threads started in the block
            move(thread, before.get(thread, everywhere))


class Neighbours:
    """CPU use by other processes since this object was created.

    Children count as part of this process once they have ended.
    """

    def __init__(self) -> None:
        self._started, self._busy, self._own = _clocks()

    def cores(self) -> float | None:
        """Return the average number of cores used; None if the system does not report it."""
        now, busy, own = _clocks()
        if busy is None or self._busy is None or now == self._started:
            return None
        return max(busy - self._busy - (own - self._own), 0.0) / (now - self._started)


def _clocks() -> tuple[float, float | None, float]:
    """Wall-clock time, CPU time of all processes, and of this one and its children, in seconds."""
    busy = None
    with contextlib.suppress(OSError):  # not Linux
        line = STATISTICS.read_text(encoding="ascii").splitlines()[0]
        # user nice system idle iowait irq softirq steal, in ticks; guest time is part of user.
        ticks = [int(field) for field in line.split()[1:9]]
        busy = (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")
    return time.monotonic(), busy, sum(os.times()[:4])


def _threads() -> list[int]:
    return [int(path.name) for path in _THREADS.iterdir()]


def _physical(core: int) -> str:
    """Name the physical core; fall back to the core's number if the system does not report it."""
    path = CPU_TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return str(core)


PACKAGES = ("replicax", "jax", "jaxlib", "numpy", "optax")


def environment() -> dict[str, Any]:
    """Date, hardware and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": processor()["processor"],
        "cores": core_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


NEIGHBOURS_TO_NOTE = 0.05
"""Share of the machine's cores above which use by other processes is noted."""


def notes_on_neighbours(cores: float | None) -> list[str]:
    """Return a note if other processes used many `cores` on average during the measurement."""
    if cores is None or cores < NEIGHBOURS_TO_NOTE * (os.cpu_count() or 1):
        return []
    return [
        f"other processes used {cores:.1f} of the machine's {os.cpu_count()} cores: times are too "
        "long and efficiency is unreliable; measure again on an idle machine"
    ]


def notes_on_machine(most: int, platform: str, pinned: bool) -> list[str]:
    """Return notes on what measurements with up to `most` devices of this machine leave out."""
    notes = []
    if platform == "cpu" and most > 1 and not pinned:
        cores = core_count()
        pin = (
            "--pin gives each device a core"
            if most <= cores
            else f"--pin, which gives each device a core, needs {most}"
        )
        notes.append(
            f"{most} devices share {cores} cores: efficiency differs from {most} machines; {pin}"
        )
    if platform != "cpu":
        notes.append(
            f"FLOP/s are counted in the traced step: a {platform.upper()}'s compiled program does "
            "not show them"
        )
    if getattr(jax.config, "jax_compilation_cache_dir", None):
        notes.append("JAX's compilation cache is enabled: compile times may be cache reads")
    return notes

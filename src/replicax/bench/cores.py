"""Which processor cores this process runs on, for a while."""

import contextlib
import os
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from replicax.errors import ConfigError

THREADS = Path("/proc/self/task")
TOPOLOGY = Path("/sys/devices/system/cpu")
STATISTICS = Path("/proc/stat")


def check_pinning(devices: int, platform: str) -> None:
    """Raise `ConfigError` where each of `devices` devices cannot have a core of its own."""
    if platform != "cpu":
        raise ConfigError(
            f"pin with {platform} devices; only host devices share cores: leave pin out"
        )
    if not sys.platform.startswith("linux"):
        raise ConfigError(f"pin on {sys.platform}; cores are given out on Linux: leave pin out")
    cores = len(own_cores())
    if devices > cores:
        raise ConfigError(
            f"pin with {devices} devices on {cores} cores; each device needs a core: use at most "
            f"{cores} devices, or leave pin out"
        )


def core_count() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def own_cores() -> list[int]:
    """The cores this thread may use, one of each physical core before their second threads."""
    cores = sorted(os.sched_getaffinity(0))
    siblings: dict[str, int] = {}
    turn = {}
    for core in cores:
        physical = _physical(core)
        turn[core] = siblings[physical] = siblings.get(physical, -1) + 1
    return sorted(cores, key=lambda core: (turn[core], core))


@contextlib.contextmanager
def only_cores(cores: Sequence[int]) -> Generator[None]:
    """Every thread of this process runs on `cores` alone, until the block is left.

    A process for each device would enter it once, with one core: `own_cores()[device:][:1]`.
    """
    before = {thread: os.sched_getaffinity(thread) for thread in _threads()}
    everywhere = os.sched_getaffinity(0)
    try:
        for thread in before:
            _move(thread, set(cores))
        yield
    finally:
        for thread in _threads():  # with those that were born in here, on `cores` alone
            _move(thread, before.get(thread, everywhere))


class Neighbours:
    """How much of the machine's cores other processes have had since this was made.

    Children count as this process, once they have ended.
    """

    def __init__(self) -> None:
        self._started, self._busy, self._own = _clocks()

    def cores(self) -> float | None:
        """On average, in cores; None where the system does not tell."""
        now, busy, own = _clocks()
        if busy is None or self._busy is None or now == self._started:
            return None
        return max(busy - self._busy - (own - self._own), 0.0) / (now - self._started)


def _clocks() -> tuple[float, float | None, float]:
    """Seconds: of the wall, of all processes on all cores, of this one and those it has started."""
    return time.monotonic(), _busy_seconds(), sum(os.times()[:4])


def _busy_seconds() -> float | None:
    try:
        line = STATISTICS.read_text(encoding="ascii").splitlines()[0]
    except OSError:  # no Linux
        return None
    # user nice system idle iowait irq softirq steal, in ticks; what a guest has is in user.
    ticks = [int(field) for field in line.split()[1:9]]
    return (sum(ticks) - sum(ticks[3:5])) / os.sysconf("SC_CLK_TCK")


def _threads() -> list[int]:
    return [int(path.name) for path in THREADS.iterdir()]


def _move(thread: int, cores: set[int]) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.sched_setaffinity(thread, cores)


def _physical(core: int) -> str:
    """A name of the physical core; the core's own where the system does not tell."""
    path = TOPOLOGY / f"cpu{core}" / "topology" / "thread_siblings_list"
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return str(core)

"""The all-reduce that data-parallel training waits for: is it right, and how fast is it?"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from replicax.core.job import Job
from replicax.doctor.row import OK, PROBLEM, SKIPPED, WARNING, Row
from replicax.wording import size_text

CHECK = "all-reduce"
BUDGET_SECONDS = 8.0
_FIRST_BYTES = 4096
_STEP = 16
_REPEATS = 5
_SLOW_GPU_BYTES_PER_SECOND = 1e9
"""Below this NCCL does not use the network that comes with GPUs."""
_PERIOD = 1009
"""Prime, so that a part that lands in the wrong place shows."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """The all-reduce of one size."""

    size_bytes: int
    """That each device contributes."""
    seconds: float
    """Median."""
    algorithm_bytes_per_second: float
    """Size over time."""
    bus_bytes_per_second: float
    """What each device sends and receives at that speed: 2 (N - 1) / N times the former."""


def check_reduction(job: Job, largest_bytes: int) -> list[Row]:
    """Sum known numbers over all devices, in growing sizes. All processes call it.

    Args:
        job: of this process.
        largest_bytes: that a device contributes.
    """
    devices = jax.devices()
    if len(devices) == 1:
        return [Row(CHECK, "one device: nothing to reduce", SKIPPED)]
    mesh = Mesh(np.asarray(devices), ("devices",))
    deadline = time.monotonic() + BUDGET_SECONDS
    wrong = _Sum(mesh, _FIRST_BYTES, jnp.int32).wrong()
    timings: list[Timing] = []
    left_out = None
    for size in sizes(largest_bytes):
        job.move()
        left_out = _reason_to_stop(job, size, timings, deadline)
        if left_out:
            break
        trial = _Sum(mesh, size, jnp.float32)
        wrong += trial.wrong()
        timings.append(timing(size, trial.seconds(), len(devices)))
    wrong_of = job.gather("the doctor's sums", wrong)
    return judge_reduction(timings, wrong_of, len(devices), devices[0].platform, left_out)


def sizes(largest_bytes: int) -> list[int]:
    """4 KiB, and 16 times as much each time, up to `largest_bytes`, which is the last."""
    found, size = [], _FIRST_BYTES
    while size < largest_bytes:
        found.append(size)
        size *= _STEP
    return [*found, largest_bytes]


def timing(size_bytes: int, seconds: float, devices: int) -> Timing:
    """The bandwidths of one all-reduce."""
    algorithm = size_bytes / seconds
    return Timing(size_bytes, seconds, algorithm, algorithm * 2 * (devices - 1) / devices)


def judge_reduction(
    timings: list[Timing],
    wrong_of: list[int],
    devices: int,
    platform: str,
    left_out: str | None,
) -> list[Row]:
    """One row with the speed, and one for each thing that is wrong.

    Args:
        timings: by size.
        wrong_of: for each process, how many sums are not what they must be.
        devices: how many were summed over.
        platform: of the devices.
        left_out: why the sizes that are missing were not measured.
    """
    figures = {"devices": devices, "sizes": [dataclasses.asdict(each) for each in timings]}
    text = f"sums over {devices} devices are {'wrong' if any(wrong_of) else 'exact'}"
    fastest = max(timings, key=lambda each: each.bus_bytes_per_second, default=None)
    if fastest is not None:
        text += f", up to {fastest.bus_bytes_per_second / 1e9:.3g} GB/s on the bus"
    if left_out:
        text += f"; {left_out}"
    if any(wrong_of):
        where = ", ".join(f"{count:,} on process {n}" for n, count in enumerate(wrong_of) if count)
        fix = "train nothing on these devices; test them, their driver and NCCL one by one"
        return [Row(CHECK, f"{text}: {where}", PROBLEM, fix, figures)]
    rows = [Row(CHECK, text, OK, figures=figures)]
    if platform == "gpu" and fastest is not None:
        rate = fastest.bus_bytes_per_second
        if fastest.size_bytes >= 2**20 and rate < _SLOW_GPU_BYTES_PER_SECOND:
            slow = f"{rate / 1e9:.2g} GB/s is less than any network between GPUs gives"
            fix = "NCCL_DEBUG=INFO shows the one it took; NCCL_SOCKET_IFNAME, NCCL_IB_HCA choose"
            rows.append(Row(CHECK, slow, WARNING, fix))
    return rows


class _Sum:
    """An all-reduce of `size_bytes` from each device of `mesh`, compiled."""

    def __init__(self, mesh: Mesh, size_bytes: int, dtype: Any) -> None:
        count, elements = mesh.devices.size, max(size_bytes // 4, 1)
        split, whole = PartitionSpec("devices"), PartitionSpec()

        def lift(function: Callable[..., Any], takes: Any, gives: PartitionSpec) -> Any:
            return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=takes, out_specs=gives))

        def pattern() -> jax.Array:
            return jax.lax.iota(jnp.int32, elements) % _PERIOD

        def contribution() -> jax.Array:
            return (pattern() + jax.lax.axis_index("devices")).astype(dtype)[None]

        def count_wrong(total: jax.Array) -> jax.Array:
            expected = count * pattern() + count * (count - 1) // 2
            return jnp.sum(total != expected.astype(dtype)[None])[None]

        self._values = lift(contribution, (), split)()
        self._reduce = lift(lambda values: jax.lax.psum(values, "devices"), split, whole)
        # The copies are compared where they are: each device has its own.
        self._count_wrong = lift(count_wrong, whole, split)

    def wrong(self) -> int:
        """Sums on this process's devices that are not what they must be; compiles, and warms up."""
        counts = self._count_wrong(self._reduce(self._values))
        return sum(int(np.asarray(shard.data).sum()) for shard in counts.addressable_shards)

    def seconds(self) -> float:
        """Of one all-reduce."""
        return statistics.median(self._times())

    def _times(self) -> Iterable[float]:
        for _ in range(_REPEATS):
            started = time.perf_counter()
            jax.block_until_ready(self._reduce(self._values))
            yield time.perf_counter() - started


def _reason_to_stop(job: Job, size: int, timings: list[Timing], deadline: float) -> str | None:
    """Why `size` is too much, the same in all processes: what process 0 says."""
    reason = None
    if timings:
        last = timings[-1]
        expected = last.seconds * size / last.size_bytes * (_REPEATS + 2)
        if time.monotonic() + expected > deadline:
            reason = f"{size_text(size)} and above left out: more than {BUDGET_SECONDS:.0f} s"
    # Its own contribution, the sum, and what the backend takes meanwhile.
    needed, free = 4 * size * jax.local_device_count(), _free_bytes()
    if free is not None and needed > free / 2:
        reason = f"{size_text(size)} and above left out: they take {size_text(needed)} of memory"
    said = job.gather("the doctor's size", reason)
    return next((each for each in said if each), None)


def _free_bytes() -> int | None:
    """Memory that the devices' host has left; None where the devices have their own."""
    if jax.devices()[0].platform != "cpu":
        return None
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            available = next(line for line in file if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return int(available.split()[1]) * 1024

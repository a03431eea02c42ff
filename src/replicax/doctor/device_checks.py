"""Checks of the devices that JAX uses: unused accelerators, the mesh, and the all-reduce."""

import collections
import dataclasses
import glob
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from replicax.cluster.accelerators import VISIBLE, list_gpus
from replicax.core.first_step import memory_check
from replicax.core.ground.job import Job
from replicax.core.placement.mesh import make_mesh
from replicax.errors import ConfigError
from replicax.text.checks import FAIL, NOTE, PASS, SKIP, Check
from replicax.text.wording import counted, size_text

DEVICES = "devices"
MESH = "mesh"
REDUCTION = "all-reduce"
BUDGET_SECONDS = 8.0
_PLATFORMS = "JAX_PLATFORMS"
_INSTALL = {
    "gpu": "pip install -U 'jax[cuda13]' (driver 580 or newer; 'jax[cuda12]' from 525)",
    "tpu": "pip install -U 'jax[tpu]'",
}

_FIRST_BYTES = 4096
_STEP = 16
_REPEATS = 5
_SLOW_GPU_BYTES_PER_SECOND = 1e9
"""Below this rate, NCCL is not using the GPU interconnect."""
_PERIOD = 1009
"""Prime, so that a misplaced part of the array is detected."""


@dataclasses.dataclass(frozen=True)
class FoundDevices:
    """The devices of all processes, as reported by JAX, and this process's host."""

    platform: str
    kinds: Sequence[str]
    of_process: Sequence[int]
    """Number of devices of each process."""
    memory_bytes: int | None
    """Memory of one device, if known."""
    cores: int
    gpus: int
    """GPUs that nvidia-smi lists on this host."""
    tpus: int
    """Device files of TPUs on this host."""


def check_attached_devices(env: Mapping[str, str]) -> list[Check]:
    """Check the devices that JAX found. Call it after joining, because it initializes them."""
    devices = _devices(env)
    pinned = hasattr(os, "sched_getaffinity")
    owned = collections.Counter(device.process_index for device in devices)
    found = FoundDevices(
        platform=devices[0].platform,
        kinds=list(dict.fromkeys(device.device_kind for device in devices)),
        of_process=[owned[process] for process in range(jax.process_count())],
        memory_bytes=(jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"),
        cores=len(os.sched_getaffinity(0)) if pinned else os.cpu_count() or 1,
        gpus=sum(line.startswith("GPU") for line in list_gpus().splitlines()),
        tpus=len(glob.glob("/dev/accel[0-9]*")),
    )
    return judge_devices(found, env)


def judge_devices(found: FoundDevices, env: Mapping[str, str]) -> list[Check]:
    """Return one row with the devices, and one per problem with them."""
    count = sum(found.of_process)
    text = counted(count, f"{' and '.join(found.kinds)} device")
    if len(found.of_process) > 1:
        text += f" of {len(found.of_process)} processes"
    if found.memory_bytes:
        text += f", {found.memory_bytes / 2**30:,.0f} GiB each"
    if found.platform == "cpu":
        own, cores = found.of_process[0], found.cores
        text += f" · {counted(cores, 'core')}"
        if own == 1 and cores > 1:
            text += f"; JAX_NUM_CPU_DEVICES={cores} creates more"
    if env.get(_PLATFORMS):
        text += f" · {_PLATFORMS}={env[_PLATFORMS]}"
    rows = [Check(DEVICES, "", PASS, text, figures=dataclasses.asdict(found))]
    if len(set(found.of_process)) > 1:
        counts = ", ".join(map(str, found.of_process))
        text = f"the processes have {counts} devices; all must have the same number"
        fix = f"give each process the same number ({VISIBLE}, JAX_NUM_CPU_DEVICES)"
        rows.append(Check(DEVICES, "", FAIL, text, fix))
    return rows + _unused_accelerators(found, env)


def check_default_mesh() -> list[Check]:
    """Report the default mesh."""
    mesh = make_mesh()
    shape = {name: int(size) for name, size in mesh.shape.items()}
    split = " x ".join(f"{name} {size}" for name, size in shape.items())
    replicas = counted(shape["data"], "replica")
    return [Check(MESH, "", PASS, f"{split}: {replicas}", figures={"shape": shape})]


def _devices(env: Mapping[str, str]) -> list[jax.Device]:
    try:
        return jax.devices()
    except Exception as error:  # JAX has no specific type, and plugins raise their own
        text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
        wanted = env.get(_PLATFORMS)
        if not wanted:
            raise ConfigError(f"JAX finds no devices ({text}): {_INSTALL['gpu']}") from error
        kind = "tpu" if "tpu" in wanted else "gpu"
        raise ConfigError(
            f"JAX finds no devices for {_PLATFORMS}={wanted} ({text}): "
            f"{_INSTALL[kind]}; or unset {_PLATFORMS}"
        ) from error


def _unused_accelerators(found: FoundDevices, env: Mapping[str, str]) -> list[Check]:
    if found.platform != "cpu" or not (found.gpus or found.tpus):
        return []
    kind, count = ("GPU", found.gpus) if found.gpus else ("TPU", found.tpus)
    there = f"{counted(count, kind)} on this host {'are' if count > 1 else 'is'}"
    hides_gpus = env.get(VISIBLE, "0").strip() in ("", "-1", "NoDevFiles")
    hidden_by = _PLATFORMS if env.get(_PLATFORMS) else VISIBLE if found.gpus and hides_gpus else ""
    if hidden_by:
        text = f"{there} not used because of {hidden_by}={env[hidden_by]}"
        return [Check(DEVICES, "", NOTE, text, f"unset {hidden_by}")]
    text = f"{there} not used by JAX, because no plugin works"
    platform = "cuda" if found.gpus else "tpu"
    fix = f"{_INSTALL[kind.lower()]}; {_PLATFORMS}={platform} then shows the remaining error"
    return [Check(DEVICES, "", FAIL, text, fix)]


class Timing(TypedDict):
    """Timing of the all-reduce for one size."""

    size_bytes: int
    """Bytes that each device contributes."""
    seconds: float
    """Median time."""
    algorithm_bytes_per_second: float
    """Size divided by time."""
    bus_bytes_per_second: float
    """Rate at which each device sends and receives: 2 (N - 1) / N times the algorithm rate."""


def check_reduction(job: Job, largest_bytes: int) -> list[Check]:
    """Sum known numbers over all devices, in growing sizes. All processes must call it."""
    devices = jax.devices()
    if len(devices) == 1:
        return [Check(REDUCTION, "", SKIP, "one device: nothing to reduce")]
    mesh = Mesh(np.asarray(devices), ("devices",))
    deadline = time.monotonic() + BUDGET_SECONDS
    wrong, _ = timed_all_reduce(mesh, _FIRST_BYTES, jnp.int32)
    timings: list[Timing] = []
    left_out = None
    for size in sizes(largest_bytes):
        job.move()
        left_out = _reason_to_stop(job, size, timings, deadline)
        if left_out:
            break
        more, seconds = timed_all_reduce(mesh, size, jnp.float32)
        wrong += more
        timings.append(timing(size, seconds, len(devices)))
    wrong_of = job.gather("the doctor's sums", wrong)
    return judge_reduction(timings, wrong_of, len(devices), devices[0].platform, left_out)


def sizes(largest_bytes: int) -> list[int]:
    """List sizes from 4 KiB in factors of 16, up to and including `largest_bytes`."""
    below, size = [], _FIRST_BYTES
    while size < largest_bytes:
        below.append(size)
        size *= _STEP
    return [*below, largest_bytes]


def timing(size_bytes: int, seconds: float, devices: int) -> Timing:
    """Compute the bandwidths of one all-reduce."""
    algorithm = size_bytes / seconds
    return {
        "size_bytes": size_bytes,
        "seconds": seconds,
        "algorithm_bytes_per_second": algorithm,
        "bus_bytes_per_second": algorithm * 2 * (devices - 1) / devices,
    }


def judge_reduction(
    timings: list[Timing], wrong_of: list[int], devices: int, platform: str, left_out: str | None
) -> list[Check]:
    """Return one row with the speed, and one per problem.

    `wrong_of` is the number of wrong sums on each process; `left_out` is the reason why sizes are
    missing from `timings`.
    """
    figures = {"devices": devices, "sizes": timings}
    text = f"sums over {devices} devices are {'wrong' if any(wrong_of) else 'exact'}"
    fastest = max(timings, key=lambda each: each["bus_bytes_per_second"], default=None)
    if fastest is not None:
        text += f", up to {fastest['bus_bytes_per_second'] / 1e9:.3g} GB/s on the bus"
    if left_out:
        text += f"; {left_out}"
    if any(wrong_of):
        where = ", ".join(f"{count:,} on process {n}" for n, count in enumerate(wrong_of) if count)
        fix = "do not train on these devices; test them, their driver and NCCL one by one"
        return [Check(REDUCTION, "", FAIL, f"{text}: {where}", fix, figures)]
    rows = [Check(REDUCTION, "", PASS, text, figures=figures)]
    if platform == "gpu" and fastest is not None:
        rate = fastest["bus_bytes_per_second"]
        if fastest["size_bytes"] >= 2**20 and rate < _SLOW_GPU_BYTES_PER_SECOND:
            slow = f"{rate / 1e9:.2g} GB/s is slower than any interconnect between GPUs"
            fix = "NCCL_DEBUG=INFO shows the one in use; NCCL_SOCKET_IFNAME, NCCL_IB_HCA set it"
            rows.append(Check(REDUCTION, "", NOTE, slow, fix))
    return rows


def timed_all_reduce(mesh: Mesh, size_bytes: int, dtype: Any) -> tuple[int, float]:
    """All-reduce `size_bytes` per device; return this process's number of wrong sums and seconds.

    Each device checks its own copy of the result.
    """
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

    reduce = lift(lambda values: jax.lax.psum(values, "devices"), split, whole)
    values = lift(contribution, (), split)()
    wrong = lift(count_wrong, whole, split)(reduce(values))  # compiles and warms up
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(reduce(values))
        times.append(time.perf_counter() - started)
    counts = (int(np.asarray(shard.data).sum()) for shard in wrong.addressable_shards)
    return sum(counts), statistics.median(times)


def _reason_to_stop(job: Job, size: int, timings: list[Timing], deadline: float) -> str | None:
    """Return why `size` is too large, or None; the same in all processes."""
    reason = None
    if timings:
        last = timings[-1]
        # Two more: a first run, and the compilation.
        expected = last["seconds"] * size / last["size_bytes"] * (_REPEATS + 2)
        if time.monotonic() + expected > deadline:
            reason = f"{size_text(size)} and above skipped: more than {BUDGET_SECONDS:.0f} s"
    # The contribution, the sum, and the backend's temporary buffers.
    needed = 4 * size * jax.local_device_count()
    on_host = jax.devices()[0].platform == "cpu"
    free = memory_check.free_host_bytes() if on_host else None
    if free is not None and needed > free / 2:
        reason = f"{size_text(size)} and above skipped: they need {size_text(needed)} of memory"
    said = job.gather("the doctor's size", reason)
    return next((each for each in said if each), None)

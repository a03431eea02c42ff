"""Measure the speed of this host's devices, which share its cores."""

import contextlib
import dataclasses
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from replicax.analysis.hardware import Chip, Interconnect

SIZE = 1024
"""Rows and columns of the multiplied matrices."""
CACHED_BYTES = 2**16, 2**18, 2**20
"""Sizes of arrays that stay in a core's caches between kernels."""
PASSED_BYTES = 2**28
"""Total bytes read per measurement."""
REPEATS = 5
_DTYPES = ("float32", "bfloat16", "float16")


def measured(chip: Chip, devices: int) -> Chip:
    """Return a device of this host with its share of the measured speed of all cores.

    Args:
        chip: the CPU device.
        devices: the number of devices that share the host.
    """
    device = jax.devices("cpu")[0]
    rates = {dtype: product_flops_per_second(device, dtype) / devices for dtype in _DTYPES}
    moved = _bytes_per_second(device) / devices
    source = f"measured on this host, shared by {devices} devices"
    return dataclasses.replace(
        chip,
        flops_per_second=rates,
        memory_bytes_per_second=moved,
        # A reduction between CPU devices reads and writes their shared memory.
        inside=Interconnect(moved / 2, 0.0, f"{source}; without latency"),
        sources={**chip.sources, "flops_per_second": source, "memory_bytes_per_second": source},
    )


def product_flops_per_second(device: jax.Device, precision: str) -> float:
    """Measure the best rate of a product of two `[1024, 1024]` matrices on one device.

    This is what XLA achieves for a plain product on the available cores, not the hardware's peak.
    """
    ones = jnp.ones((SIZE, SIZE), jnp.dtype(precision), device=device)
    return float(2 * SIZE**3 / _best_seconds(jax.jit(jnp.matmul), ones, ones))


def _bytes_per_second(device: jax.Device) -> float:
    """Measure the peak bandwidth of all cores combined, in their caches.

    On a CPU, a kernel often finds its input in a cache, which is several times as fast as main
    memory: by main memory's bandwidth, real steps were 2.5 times as fast as "at best".
    """

    def passes(ones: jax.Array) -> jax.Array:
        times = PASSED_BYTES // ones.nbytes
        passed: jax.Array = jax.lax.fori_loop(0, times, lambda _, values: -values, ones)
        return passed

    arrays = [jnp.ones(size // 4, jnp.float32, device=device) for size in CACHED_BYTES]
    core = max(2 * PASSED_BYTES / _best_seconds(jax.jit(passes), ones) for ones in arrays)
    return core * len(os.sched_getaffinity(0))


def _best_seconds(function: Callable[..., Any], *arguments: jax.Array) -> float:
    seconds = []
    for _ in range(1 + REPEATS):  # the first compiles
        started = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def host_processor() -> str:
    """Return the model and the features of this machine's CPU, as far as they are known."""
    text = platform.machine()
    with contextlib.suppress(OSError):  # only Linux has it
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        known = ("vendor_id", "model name", "flags", "Features", "CPU part")
        text += "".join(sorted({line for line in lines if line.startswith(known)}))
    return text

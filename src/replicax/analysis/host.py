"""What the devices of this host can do, measured: no data sheet tells how it is shared."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from replicax.analysis.hardware import Chip, Link

SIZE = 1024
"""Of the matrices that are multiplied."""
COPIED_BYTES = 2**28
"""Beyond any cache."""
REPEATS = 5
_DTYPES = ("float32", "bfloat16", "float16")


def measured(chip: Chip, devices: int) -> Chip:
    """A device of this host, with a share of what all its cores can do together.

    Args:
        chip: the CPU device.
        devices: that share the host.
    """
    device = jax.devices("cpu")[0]
    rates = {dtype: product_flops_per_second(device, dtype) / devices for dtype in _DTYPES}
    copied = _copied_bytes_per_second(device) / devices
    told = f"measured on this host, shared by {devices} devices"
    return dataclasses.replace(
        chip,
        flops_per_second=rates,
        memory_bytes_per_second=copied,
        # A reduction between host devices reads and writes the memory that they share.
        inside=Link(copied / 2, 0.0, f"{told}; without latency"),
        sources={**chip.sources, "flops_per_second": told, "memory_bytes_per_second": told},
    )


def product_flops_per_second(device: jax.Device, precision: str) -> float:
    """The rate of a product of two `[1024, 1024]` matrices, the best of some, on one device.

    Not the hardware's peak: what XLA makes of the plainest product on the cores it has now.
    """
    ones = jnp.ones((SIZE, SIZE), jnp.dtype(precision), device=device)
    return float(2 * SIZE**3 / _best_seconds(jax.jit(jnp.matmul), ones, ones))


def _copied_bytes_per_second(device: jax.Device) -> float:
    """Of reading and writing, as a kernel that only copies does it."""
    ones = jnp.ones(COPIED_BYTES // 4, jnp.float32, device=device)
    return 2 * COPIED_BYTES / _best_seconds(jax.jit(jnp.negative), ones)


def _best_seconds(function: Callable[..., Any], *arguments: jax.Array) -> float:
    seconds = []
    for _ in range(1 + REPEATS):  # the first compiles
        started = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])

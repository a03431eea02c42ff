"""XLA's threads on a CPU, whose number decides how a matrix product is rounded."""

import os

import jax
from jax.sharding import Mesh

from replicax.errors import ConfigError

VARIABLE = "NPROC"
"""What XLA takes for the number of cores, where it is set before JAX's first use."""


def fix_threads(micro_shards: int) -> None:
    """Have XLA start as many threads as there are micro-shards. Call it before JAX's first use."""
    os.environ.setdefault(VARIABLE, str(micro_shards))


def check_threads(mesh: Mesh, micro_shards: int) -> None:
    """Raise `ConfigError` where a CPU has not as many threads as there are micro-shards.

    XLA starts a thread for each core that the process may use, and not less than one for each of
    its devices. On one device of two cores a large product is rounded otherwise than on one device
    of eight, so that it takes a number which every layout and every machine can have.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return
    devices = jax.local_device_count()
    threads = max(_cores(), devices)
    if threads != micro_shards:
        fix = (
            f"raise micro_shards to {1 << (devices - 1).bit_length()}"
            if devices > micro_shards
            else f"set {VARIABLE}={micro_shards} before JAX starts"
        )
        raise ConfigError(
            f"mode='exact' with {threads} XLA threads for {devices} CPU devices, and micro_shards="
            f"{micro_shards}; the bits are those of as many threads as micro-shards: {fix}"
        )


def _cores() -> int:
    """As XLA counts them."""
    named = os.environ.get(VARIABLE, "")
    if named.isdecimal() and int(named):
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

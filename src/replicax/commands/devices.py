"""Host devices to order."""

import contextlib

import jax


def make_host_devices(count: int) -> None:
    """Make a CPU `count` devices, where JAX has not counted its devices yet."""
    with contextlib.suppress(RuntimeError):  # the backend is up: its devices are what they are
        jax.config.update("jax_num_cpu_devices", count)

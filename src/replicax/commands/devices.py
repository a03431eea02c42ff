"""Host devices to order."""

import contextlib

import jax

from replicax.cluster.link import current_link
from replicax.errors import ConfigError


def make_host_devices(count: int) -> None:
    """Make a CPU `count` devices, where JAX has not counted its devices yet."""
    with contextlib.suppress(RuntimeError):  # the backend is up: its devices are what they are
        jax.config.update("jax_num_cpu_devices", count)


def of_this_process(devices: int) -> int:
    """This process's part of `--devices`.

    Raises:
        ConfigError: the processes do not divide them.
    """
    link = current_link()
    count = 1 if link is None else link.processes
    if devices % count:
        raise ConfigError(
            f"--devices {devices} on {count} processes leaves a remainder; each takes part with as "
            f"many: use a multiple of {count}"
        )
    return devices // count

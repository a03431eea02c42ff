"""The devices and the processes that a command runs on."""

import contextlib
import os

import jax

from replicax.cluster.place import find_place
from replicax.errors import ConfigError


def make_host_devices(devices: int, processes: int = 1) -> None:
    """Simulate this process's share of `--devices` on a CPU, if JAX has not looked at it yet.

    Raises:
        ConfigError: no device, or a number that the processes do not divide.
    """
    if devices < 1:
        raise ConfigError(f"--devices {devices}; a step runs on at least 1: raise it")
    if devices % processes:
        raise ConfigError(
            f"--devices {devices} on {processes} processes leaves a remainder; each takes part "
            f"with as many: use a multiple of {processes}"
        )
    with contextlib.suppress(RuntimeError):  # the backend is up: its devices are what they are
        jax.config.update("jax_num_cpu_devices", devices // processes)


def check_alone(command: str, why: str) -> None:
    """Raise `ConfigError` in a job of several processes."""
    place = find_place(os.environ)
    if place.processes > 1:
        raise ConfigError(
            f"{command} as process {place.process} of {place.processes} ({place.engine}); {why}"
        )

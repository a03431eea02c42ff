"""Every test sees eight CPU devices, and nothing of the caller's Replicax settings."""

import os
import signal

import pytest

# Before jax is imported: a device count cannot change once the devices have been looked at, and
# child processes take the platform from the environment.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)

# A shell's background jobs are born deaf to Ctrl-C, and tests of it with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _no_replicax_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("REPLICAX_")]:
        monkeypatch.delenv(name)

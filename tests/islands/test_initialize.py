"""`rx.initialize` of a process that is an island."""

import os
import subprocess
import sys

import pytest

from replicax.launch.process import free_port

_PRINT_POLICIES = """
import os, pathlib
import jax
import replicax as rx

rx.initialize(verbose=False)
jax.devices()
policies = {"xla": set(), "others": set()}
for task in pathlib.Path("/proc/self/task").iterdir():
    kind = "xla" if "XLAEigen" in (task / "comm").read_text() else "others"
    policies[kind].add(os.sched_getscheduler(int(task.name)))
print(*map(sorted, policies.values()))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no SCHED_BATCH")
def test_xlas_threads_preempt_nobody_and_those_of_the_network_do() -> None:
    place = {"REPLICAX_ISLAND": "0", "REPLICAX_ISLANDS": f"127.0.0.1:{free_port()},127.0.0.1:1"}
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "REPLICAX_SECRET": "s", **place}
    command = [sys.executable, "-c", _PRINT_POLICIES]
    told = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    assert told.split() == [f"[{os.SCHED_BATCH}]", f"[{os.SCHED_OTHER},", f"{os.SCHED_BATCH}]"]

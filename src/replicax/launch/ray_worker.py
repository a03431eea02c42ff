"""Run a command on a node of a Ray cluster, inside one of Ray's workers."""

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from replicax.cluster.variables import SECRET, SECRET_FILE
from replicax.launch.attempt import Attempt
from replicax.launch.cause import Ended
from replicax.launch.event_loop import EventLoop
from replicax.launch.process import ProcessStart

FORWARDED = ("JAX_", "XLA_", "LIBTPU_", "NCCL_", "GLOO_", "REPLICAX_")
"""Prefixes of the environment variables that are passed on to the command."""
WORKER_ENV = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
"""The runtime environment of the workers: the guard, not an exiting worker, ends the command."""


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the launcher that the command gets on another node."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(FORWARDED) and name not in (SECRET, SECRET_FILE)
    }


def run_on_node(start: ProcessStart, folder: str, loop: EventLoop) -> Ended:
    """Run the command of `start` to its end, in `folder` if this node has it.

    Its environment is the node's, with that of `start`; Ray keeps its output.

    Raises:
        ClusterError: the system cannot start a process.
    """
    row = start.number if start.row is None else start.row
    try:
        os.chdir(folder)
    except OSError as error:
        where = f"{folder}: {error.strerror} on this node; running in {os.getcwd()}"
        loop.echo.lines(row, [f"replicax: {where}".encode()], error=False)
    # Programs next to the Python that runs Ray come first: `python`, `replicax`.
    path = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    env = {**os.environ, **start.env, "PATH": os.pathsep.join(path)}
    with tempfile.TemporaryDirectory(prefix="replicax-") as temporary:
        report = Path(temporary) / "failure.json"
        here = dataclasses.replace(start, env=env, log=Path(os.devnull), report=report)
        try:
            (ended,) = Attempt([here], loop).run()
        finally:
            loop.echo.close(lambda: False)
    return dataclasses.replace(ended, log=None)

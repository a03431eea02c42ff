"""Runs a script as the processes of a job, without the launcher."""

import atexit
import dataclasses
import functools
import os
import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from support.fork_server import PRELOADED, ForkServer
from support.programs import CACHE

SUPPORT = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def run_job(
    *command: object,
    processes: int = 2,
    devices: int = 1,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 240.0,
) -> list[Ended]:
    """Run `python COMMAND` as a job on this host; how each process ended, in order.

    Args:
        command: a script and its arguments, or `-m`, a module and its arguments.
        processes: how many.
        devices: host devices of each.
        env: variables to add.
        timeout_seconds: until all must have ended; else the processes are killed.
    """
    shared = {
        **{name: str(value) for name, value in {**CACHE, **(env or {})}.items()},
        "JAX_NUM_CPU_DEVICES": str(devices),
        "REPLICAX_PROCESSES": str(processes),
        "REPLICAX_COORDINATOR": f"127.0.0.1:{free_port()}",
        "REPLICAX_JOB_ID": "test",
    }
    with tempfile.TemporaryDirectory() as folder:
        outputs = [
            [Path(folder, f"{process}.{name}") for name in ("out", "err")]
            for process in range(processes)
        ]
        started = [
            _server().fork(
                [*map(str, command)], {**shared, "REPLICAX_PROCESS_ID": str(process)}, *paths
            )
            for process, paths in enumerate(outputs)
        ]
        try:
            assert _server().wait(started, timeout_seconds), "the job did not end in time"
        finally:
            for child in started:
                child.signal(signal.SIGKILL)
        texts = [[path.read_text() for path in paths] for paths in outputs]
    return [Ended(child.status or 0, *text) for child, text in zip(started, texts, strict=True)]


@functools.cache
def _server() -> ForkServer:
    """Return the server that forks all jobs of this process."""
    path = os.pathsep.join([str(SUPPORT.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    server = ForkServer(
        {**os.environ, "PYTHONPATH": path}, (*PRELOADED, "flax.nnx", "replicax.cli")
    )
    atexit.register(server.close)
    return server

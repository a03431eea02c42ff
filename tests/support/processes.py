"""Runs a script as the processes of a job, without the launcher."""

import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    out: str
    err: str


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
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
        **os.environ,
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join(
            [str(SUPPORT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "REPLICAX_PROCESSES": str(processes),
        "REPLICAX_COORDINATOR": f"127.0.0.1:{free_port()}",
        "REPLICAX_JOB_ID": "test",
        **(env or {}),
    }
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={**shared, "REPLICAX_PROCESS_ID": str(process)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(processes)
    ]
    try:
        texts = [process.communicate(timeout=timeout_seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    return [Ended(p.returncode, *text) for p, text in zip(started, texts, strict=True)]

"""Several warm processes of one script, with one core each, that run on request.

A benchmark creates a `Group`, whose script calls `serve`. A request is a line with one number to
every process, and the answer is a line of JSON from process 0.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_peer import KEEP_FREED_MEMORY

from replicax.cluster import variables

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Group:
    """A script in this folder as `processes` processes, each pinned to one of `cores`."""

    def __init__(
        self, script: str, arguments: Sequence[str], processes: int, cores: Sequence[int]
    ) -> None:
        self.name = f"{script} {' '.join(arguments)} on {processes}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the processes)
        port, job = free_port(), secrets.token_hex(8)
        program = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
        self._processes = [
            subprocess.Popen(
                ["taskset", "-c", str(core), *program, str(number), str(processes), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
                stderr=self._errors,
                text=True,
                env={**os.environ, **KEEP_FREED_MEMORY, **ONE_THREAD, **place(number, processes)}
                | {variables.COORDINATOR: f"127.0.0.1:{port}", variables.JOB_ID: job},
            )
            for number, core in zip(range(processes), cores, strict=False)
        ]

    def tell(self, number: int) -> None:
        """Send `number` to every process."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # `answer` reports why it ended
                process.stdin.write(f"{number}\n")
                process.stdin.flush()

    def answer(self) -> Any:
        """Return process 0's next answer; the first one describes the script, once it is warm."""
        line = self._processes[0].stdout.readline()
        if not line:
            self._errors.seek(0)
            last = (self._errors.read().strip().splitlines() or ["no output"])[-1]
            raise SystemExit(f"{self.name} failed: {last}")
        return json.loads(line)

    def close(self) -> None:
        """Stop all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def place(number: int, processes: int) -> dict[str, str]:
    """Return the job variables for Replicax and JAX; PyTorch uses the arguments instead."""
    return {
        variables.PROCESS_ID: str(number),
        variables.PROCESSES: str(processes),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
    }


def serve(prepare: Callable[[], tuple[dict[str, Any], Callable[[int], Any]]]) -> None:
    """Print the first result of `prepare`, then answer each number on stdin with the second."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep library output out of the answers
    about, run = prepare()
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run(int(line))), file=answers, flush=True)


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]

"""PyTorch in processes of its own, started once and warm, that run when they are told to.

Both ends of it: a benchmark makes a `Peer`, whose script calls `serve`. An order is a line with one
number, the answer a line of JSON.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Run = Callable[[int], Any]
"""What a process does with a number; the answer of the first process counts."""
Prepare = Callable[[int], Run]
"""`prepare(rank)` builds the model and warms up."""

# What `replicax.train.host_memory.keep_freed_memory` does for JAX, as glibc's variables.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**28),
}


def torch_version(python: str) -> str | None:
    """Version of torch that `python` has; None where it has none."""
    command = [python, "-c", "import torch; print(torch.__version__)"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Peer:
    """A script of this folder, run by `python`, an interpreter that has torch; it ends with us."""

    def __init__(self, python: str, script: str, arguments: Sequence[str]) -> None:
        self._name = f"{script} {arguments[-1]}"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process)
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **KEEP_FREED_MEMORY},
        )
        self._answer()

    def __call__(self, number: int) -> Any:
        """Its answer to a number."""
        with contextlib.suppress(BrokenPipeError):  # why it has ended, `_answer` tells
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            cause = (self._errors.read().strip().splitlines() or ["no output"])[-1]
            raise RuntimeError(f"{self._name} failed: {cause}")
        return json.loads(line)


def serve(prepare: Prepare, processes: int, threads: int, backend: str = "gloo") -> None:
    """Answer the numbers on stdin until it ends.

    Several `processes` are a process group of torch.distributed, and all run every number.
    `threads` are those of each process.
    """
    import torch.multiprocessing as mp

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints is no answer
    context = mp.get_context("spawn")
    group = f"tcp://127.0.0.1:{_free_port()}"
    queues = [context.SimpleQueue() for _ in range(1, processes)]
    for rank, queue in enumerate(queues, start=1):
        arguments = prepare, rank, processes, threads, backend, group, queue
        context.Process(target=_follow, args=arguments, daemon=True).start()
    run = _ready(prepare, 0, processes, threads, backend, group)
    print(json.dumps(None), file=answers, flush=True)
    for line in sys.stdin:
        for queue in queues:
            queue.put(int(line))
        print(json.dumps(run(int(line))), file=answers, flush=True)


def _follow(
    prepare: Prepare,
    rank: int,
    processes: int,
    threads: int,
    backend: str,
    group: str,
    numbers: Any,
) -> None:
    run = _ready(prepare, rank, processes, threads, backend, group)
    while True:  # it is a daemon, and ends with the first process
        run(numbers.get())


def _ready(
    prepare: Prepare, rank: int, processes: int, threads: int, backend: str, group: str
) -> Run:
    import torch

    torch.set_num_threads(threads)
    if processes > 1:
        torch.distributed.init_process_group(
            backend, init_method=group, rank=rank, world_size=processes
        )
    return prepare(rank)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]

"""PyTorch in separate warm processes that run on request.

A benchmark creates a `Peer`, whose script calls `serve`. A request is a line with one number, and
the answer is a line of JSON.
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
"""A process's handler for a number; the answer of the first process is used."""
Prepare = Callable[[int], Run]
"""`prepare(rank)` builds the model and warms up."""

# The glibc variables for the settings of `replicax.train.run.host_memory.keep_freed_memory`.
KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_TOP_PAD_": str(2**28),
}


def torch_version(python: str) -> str | None:
    """Return the version of torch that `python` has, or None."""
    command = [python, "-c", "import torch; print(torch.__version__)"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


class Peer:
    """A script in this folder, run by `python`, which has torch; exits with the parent."""

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
        """Return the process's answer to a number."""
        with contextlib.suppress(BrokenPipeError):  # `_answer` reports why it ended
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
    """Answer the numbers on stdin until it is closed.

    Several `processes` form a torch.distributed process group, and all run every number. Each uses
    `threads` threads.
    """
    import torch.multiprocessing as mp

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep torch's output out of the answers
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
    while True:  # a daemon, which exits with the first process
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

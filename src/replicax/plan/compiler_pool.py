"""Several processes of one compiler, for threads that compile at once."""

import os
from queue import SimpleQueue
from threading import Lock
from types import TracebackType

from replicax.errors import CompilerError
from replicax.plan.compilation import Compilation, Description, TooLarge
from replicax.plan.compiler import CompilerProcess
from replicax.plan.program import Program

MOST_PROCESSES = 2
"""One for the search, one for what is looked at beside it; each takes a gigabyte or two."""


class CompilerPool:
    """A `Compiler` that several threads may ask; it starts processes as they are needed.

    Args:
        description: the devices to compile for.

    Raises:
        ReplicaxError: on entering; see `CompilerProcess`.
    """

    def __init__(self, description: Description) -> None:
        self._description = description
        self._lock, self._free = Lock(), SimpleQueue[CompilerProcess]()
        self._started: list[CompilerProcess] = []
        self._most = min(MOST_PROCESSES, os.cpu_count() or 1)
        self._closed = False
        self.name = ""

    def __enter__(self) -> "CompilerPool":
        first = self._start()
        self.name = first.name
        self._free.put(first)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Whoever waits for one of them gets an error, and so does who asks."""
        with self._lock:
            self._closed = True
        for process in self._started:
            process.close()

    def compile(self, program: Program) -> Compilation | TooLarge:
        """See `Compiler`."""
        process = self._take()
        try:
            return process.compile(program)
        finally:
            self._free.put(process)

    def _take(self) -> CompilerProcess:
        with self._lock:
            if self._closed:
                raise CompilerError("the compilers were ended before they were asked")
            if self._free.empty() and len(self._started) < self._most:
                return self._start()
        return self._free.get()

    def _start(self) -> CompilerProcess:
        process = CompilerProcess(self._description).__enter__()
        self._started.append(process)
        return process

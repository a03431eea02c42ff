"""Which lines and branches of the package a process executes, by `sys.monitoring`.

Only code objects of the package are instrumented, so that JAX runs at its own speed.
"""

import atexit
import importlib.machinery
import os
import pickle
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import CodeType
from typing import Any

PACKAGE = str(Path(__file__).resolve().parents[2] / "src" / "replicax") + os.sep
CHILDREN = "TEST_REACH_CHILDREN"
"""The variable that names the folder for records of child processes; the worker sets it."""

Place = tuple[str, str, int, int]
"""A file below the package, the qualified name of a function in it, and a line and 0, or the
offset of a branch and the negative offset to which it led."""


class Tracer:
    """Counts each line and each direction of a branch once until it is taken."""

    def __init__(self) -> None:
        self._reached: set[Place] = set()
        self._directions: dict[tuple[CodeType, int], set[int]] = defaultdict(set)
        self._monitoring: Any = sys.monitoring
        events = self._monitoring.events
        self._events = events.LINE | events.BRANCH
        self._tool = self._monitoring.COVERAGE_ID
        self._monitoring.use_tool_id(self._tool, "replicax-reach")
        self._monitoring.register_callback(self._tool, events.LINE, self._line)
        self._monitoring.register_callback(self._tool, events.BRANCH, self._branch)
        loaded = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: Any, fullname: str) -> Any:
            code = loaded(loader, fullname)
            if code and code.co_filename.startswith(PACKAGE):
                self._instrument(code)
            return code

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]

    def taken(self) -> set[Place]:
        """Return what was reached since the last call."""
        reached, self._reached = self._reached, set()
        self._directions.clear()
        self._monitoring.restart_events()
        return reached

    def _instrument(self, code: CodeType) -> None:
        self._monitoring.set_local_events(self._tool, code, self._events)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._instrument(constant)

    def _line(self, code: CodeType, line: int) -> Any:
        self._reached.add((code.co_filename[len(PACKAGE) :], code.co_qualname, line, 0))
        return self._monitoring.DISABLE

    def _branch(self, code: CodeType, offset: int, destination: int) -> Any:
        directions = self._directions[code, offset]
        if destination not in directions:
            directions.add(destination)
            name = code.co_filename[len(PACKAGE) :]
            self._reached.add((name, code.co_qualname, offset, -destination))
        return self._monitoring.DISABLE if len(directions) > 1 else None


def start_in_child() -> None:
    """Record this process, which a test has started; the `sitecustomize` of the tests calls it."""
    folder = os.environ.get(CHILDREN)
    if not folder:
        return
    tracer, forked = Tracer(), False

    def fork() -> None:
        nonlocal forked
        forked = True
        tracer.taken()

    def write() -> None:
        path = Path(folder, f"{os.getpid()}-{time.time_ns()}")
        if path.parent.is_dir():
            path.write_bytes(pickle.dumps((tracer.taken(), time.process_time() if forked else 0.0)))
            path.rename(path.with_suffix(".pickle"))  # read only when it is whole

    atexit.register(write)
    os.register_at_fork(after_in_child=fork)

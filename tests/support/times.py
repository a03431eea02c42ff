"""Where the time of the tests goes, by file and by phase: `-p support.times`, as `make test-times` does.

Each worker writes its rows when it ends; the first process adds them up into a table.
"""

import json
import os
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

FOLDER = Path("build/test-times")
PHASES = ("trace", "lower", "compile", "children", "sleep")
_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
_STARTED = time.time()


class _Watch:
    """The spans of each phase since the last test ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        jax.monitoring.register_event_time_span_listener(self._compiled)
        self._timed(time, "sleep", "sleep")
        self._timed(subprocess.Popen, "wait", "children")
        self._timed(subprocess.Popen, "communicate", "children")

    def _compiled(self, event: str, start: float, end: float, **_: Any) -> None:
        if event in _EVENTS:
            self.spans.append((_EVENTS[event], start, end))

    def _timed(self, owner: Any, name: str, phase: str) -> None:
        wrapped: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            start = time.time()
            try:
                return wrapped(*args, **more)
            finally:
                if threading.current_thread() is threading.main_thread():
                    self.spans.append((phase, start, time.time()))

        setattr(owner, name, call)

    def taken(self) -> dict[str, float]:
        """Seconds of each phase; what overlaps counts once, for the phase that began last."""
        spans, self.spans = sorted(self.spans, key=lambda span: span[1]), []
        seconds = dict.fromkeys(PHASES, 0.0)
        edges = sorted({edge for _, start, end in spans for edge in (start, end)})
        open_: list[tuple[str, float, float]] = []
        following = iter([*spans, ("", float("inf"), float("inf"))])
        upcoming = next(following)
        for begin, end in zip(edges, edges[1:], strict=False):
            while upcoming[1] <= begin:
                open_.append(upcoming)
                upcoming = next(following)
            open_ = [span for span in open_ if span[2] > begin]
            if open_:
                seconds[open_[-1][0]] += end - begin
        return seconds


class Times:
    """The plugin: a row for each test, in the process that ran it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.watch = _Watch()
        self.ready = 0.0

    def pytest_collection_finish(self) -> None:
        self.ready = time.time()
        self.watch.taken()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start, cpu = time.time(), time.process_time()
        result = yield
        end = time.time()
        self.rows.append(
            {
                "test": item.nodeid,
                "seconds": end - start,
                "cpu": time.process_time() - cpu,
                "ended": end,
                **self.watch.taken(),
            }
        )
        return result  # type: ignore[return-value]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        FOLDER.mkdir(parents=True, exist_ok=True)
        about = {"started": _STARTED, "ready": self.ready, "rows": self.rows}
        (FOLDER / f"{worker}.json").write_text(json.dumps(about))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times(), "replicax-times")

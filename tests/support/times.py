"""Time of the tests by file and by phase; `make test-times` loads this plugin.

As a plugin (`-p support.times`) each worker writes its rows when it ends. As a program it adds the
rows up, prints the table of all files, and writes the largest into CONTRIBUTING.md.
"""

import itertools
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
DURATIONS = Path("tests/durations.json")
RUN = "REPLICAX_TEST_TIMES"
"""The variable that names the run: a folder in FOLDER."""
_BEGIN, _END = "<!-- make test-times writes this table -->", "<!-- end -->"
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
        for begin, end in itertools.pairwise(edges):
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
        self.run = os.environ.get(RUN, "last")

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
        folder = FOLDER / self.run
        folder.mkdir(parents=True, exist_ok=True)
        about = {"started": _STARTED, "ready": self.ready, "rows": self.rows}
        (folder / f"{worker}.json").write_text(json.dumps(about))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times(), "replicax-times")


def _files(folder: Path) -> dict[str, dict[str, float]]:
    """Seconds by file and phase, and `tests`, their number."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for path in sorted(folder.glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            each = found[row["test"].partition("::")[0].removeprefix("tests/")]
            each["tests"] += 1
            for name in ("seconds", *PHASES):
                each[name] += row[name]
    return found


def _line(name: str, cold: dict[str, float], warm: dict[str, float]) -> str:
    def shown(each: dict[str, float]) -> list[str]:
        rest = each["seconds"] - sum(each[phase] for phase in PHASES)
        return [f"{value:.1f}" for value in (*(each[phase] for phase in PHASES), rest)]

    numbers = [f"{cold['tests']:.0f}", f"{cold['seconds']:.1f}", *shown(cold)]
    again = warm["seconds"]
    return f"| {' | '.join([name, *numbers, f'{again:.1f}'])} |"


def table(cold: Path, warm: Path, most: int) -> str:
    """The `most` files that take longest, all others together, and all."""
    files, again = _files(cold), _files(warm)
    order = sorted(files, key=lambda name: -files[name]["seconds"])

    def total(names: list[str], of: dict[str, dict[str, float]]) -> dict[str, float]:
        return {key: sum(of[name][key] for name in names) for key in ("tests", "seconds", *PHASES)}

    head = f"| file | tests | seconds | {' | '.join(PHASES)} | rest | warm |"
    lines = [head, "|---|" + "--:|" * (len(PHASES) + 4)]
    lines += [_line(name, files[name], again[name]) for name in order[:most]]
    for name, names in ((f"{len(order) - most} others", order[most:]), ("all", order)):
        lines.append(_line(name, total(names, files), total(names, again)))
    starts = [f"{_starting(folder):.1f}" for folder in (cold, warm)]
    blank = " |" * len(PHASES)
    lines.append(f"| imports and collection, all workers | | {starts[0]} |{blank} | {starts[1]} |")
    return "\n".join(lines)


def _starting(folder: Path) -> float:
    """Seconds until the workers of a run had collected its tests."""
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("gw*.json"))]
    return float(sum(each["ready"] - each["started"] for each in told))


def _write() -> None:
    cold, warm = FOLDER / "cold", FOLDER / "warm"
    lines = [
        f'"{name}": [{each["tests"]:.0f}, {each["seconds"]:.1f}]'
        for name, each in sorted(_files(cold).items())
    ]
    DURATIONS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    page = Path("CONTRIBUTING.md")
    before, _, rest = page.read_text().partition(_BEGIN)
    page.write_text(f"{before}{_BEGIN}\n{table(cold, warm, 25)}\n{_END}{rest.partition(_END)[2]}")
    print(table(cold, warm, 60))


if __name__ == "__main__":
    _write()

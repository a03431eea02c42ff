"""The lines and branches of the source that each test reaches, and what each test costs.

As a plugin (`pytest -p support.reach`, Python 3.12 or newer) each worker writes a `Record` of the
tests that it ran to `build/test-reach/RUN/`. Processes that the tests start are recorded too,
through a `sitecustomize` on their PYTHONPATH; what one of them reached counts for the test that ran
when it ended. Only code objects of the package are instrumented, so that JAX runs at its own speed.
"""

import array
import dataclasses
import os
import pickle
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tracing import CHILDREN, Place, Tracer

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "test-reach"
RUN = "TEST_REACH_RUN"
"""The variable that names the run: a folder in FOLDER."""


@dataclasses.dataclass
class Test:
    """The places that one test reached, and its cost."""

    name: str
    places: array.array[int]
    """Indices of `Record.places`."""
    seconds: float
    processor_seconds: float
    """The test's own process and the children that it waited for."""
    passed: bool


@dataclasses.dataclass
class Record:
    """The tests of one worker."""

    places: list[Place]
    tests: list[Test]
    collection_seconds: float


def records(run: str) -> list[Record]:
    """Return the records of all workers of a run."""
    return [pickle.loads(path.read_bytes()) for path in sorted((FOLDER / run).glob("*.pickle"))]


_TRACER = Tracer()


class _Recorder:
    """The plugin of a worker."""

    def __init__(self, tracer: Tracer, children: Path) -> None:
        self._tracer = tracer
        self._children = children
        self._indices: dict[Place, int] = {}
        self._tests: list[Test] = []
        self._failed: set[str] = set()
        self._started = time.time()
        self._collected = 0.0

    def pytest_collection_finish(self) -> None:
        self._collected = time.time() - self._started
        self._tracer.taken()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        start, used = time.time(), _processor_seconds()
        result = yield
        seconds, used = time.time() - start, _processor_seconds() - used
        reached = self._tracer.taken()
        for path in self._children.glob("*.pickle"):
            theirs, cost = pickle.loads(path.read_bytes())
            reached |= theirs
            used += cost
            path.unlink()
        places = array.array("I", (self._index(place) for place in reached))
        self._tests.append(
            Test(item.nodeid, places, seconds, used, item.nodeid not in self._failed)
        )
        return result  # type: ignore[return-value]

    def pytest_sessionfinish(self) -> None:
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        folder = FOLDER / os.environ.get(RUN, "last")
        folder.mkdir(parents=True, exist_ok=True)
        record = Record(list(self._indices), self._tests, self._collected)
        (folder / f"{worker}.pickle").write_bytes(pickle.dumps(record))

    def _index(self, place: Place) -> int:
        return self._indices.setdefault(place, len(self._indices))


def _processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_configure(config: pytest.Config) -> None:
    if CHILDREN in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        return  # pytest within a test
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None and config.getoption("numprocesses", None):
        return  # it runs no test itself
    children = FOLDER / f"children-{worker or 'main'}"
    shutil.rmtree(children, ignore_errors=True)
    children.mkdir(parents=True)
    os.environ[CHILDREN] = str(children)
    hook = FOLDER / "hook"
    hook.mkdir(exist_ok=True)
    lines = f"import sys; sys.path.append({str(ROOT / 'tests')!r})\n"
    lines += "import support.tracing; support.tracing.start_in_child()\n"
    (hook / "sitecustomize.py").write_text(lines)
    paths = [str(hook), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    config.pluginmanager.register(_Recorder(_TRACER, children), "replicax-reach")

"""Cases, processor seconds and seconds of the tests by file, written by each worker of a run.

A plugin, which every target of the Makefile loads; `support/cost.py` adds the files up.
"""

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = "TEST_TIMES_FOLDER"
"""The variable that names the folder of a run, in which its workers write; `cost.py` sets it."""


def processor_seconds() -> float:
    """Return those of this process and of the children that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Times:
    """The plugin."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before, start = processor_seconds(), time.monotonic()
        result = yield
        of_file = self._files[item.nodeid.partition("::")[0].removeprefix("tests/")]
        of_file[0] += 1
        of_file[1] += processor_seconds() - before
        of_file[2] += time.monotonic() - start
        return result  # type: ignore[return-value]

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._files))


def pytest_configure(config: pytest.Config) -> None:
    # Only workers run tests; pytest within a test has none of the variable's folder.
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    folder = os.environ.get(FOLDER)
    if worker and folder and not config.pluginmanager.has_plugin("replicax-times"):
        config.pluginmanager.register(Times(Path(folder, f"{worker}.json")), "replicax-times")

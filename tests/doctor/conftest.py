"""Checks that all processes run together, run by threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from replicax.core.ground.job import Alone, Job

Result = TypeVar("Result")
Together = Callable[[int, Callable[[Job], Result]], list[Result]]


class _Thread(Alone):
    """A process that is a thread. The others are in `values`, topic by topic."""

    def __init__(self, number: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.process, self.processes = number, len(values)
        self._values, self._barrier = values, barrier

    def gather(self, topic: str, value: Any, **options: Any) -> list[Any]:
        self._values[self.process] = value
        self._barrier.wait(5)
        gathered = list(self._values)
        self._barrier.wait(5)
        return gathered


@pytest.fixture
def together() -> Together[Any]:
    """Runs a check in several processes; returns the result of each."""

    def run(count: int, check: Callable[[Job], Result]) -> list[Result]:
        values: list[Any] = [None] * count
        barrier = threading.Barrier(count)
        with ThreadPoolExecutor(count) as pool:
            jobs = [_Thread(number, values, barrier) for number in range(count)]
            return list(pool.map(check, jobs))

    return run

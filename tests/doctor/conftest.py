"""Checks that all processes run together, run by threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from replicax.doctor.peers import Peers

Result = TypeVar("Result")
Together = Callable[[int, Callable[[Peers], Result]], list[Result]]


class _Thread(Peers):
    """A process that is a thread. The others are in `values`, topic by topic."""

    def __init__(self, number: int, values: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        fields = {"number": number, "values": values, "barrier": barrier}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    number: int
    values: list[Any]
    barrier: threading.Barrier

    @property
    def process(self) -> int:
        return self.number

    @property
    def processes(self) -> int:
        return len(self.values)

    def gather(self, topic: str, value: Any) -> list[Any]:
        self.values[self.number] = value
        self.barrier.wait(5)
        gathered = list(self.values)
        self.barrier.wait(5)
        return gathered


@pytest.fixture
def together() -> Together[Any]:
    """Runs a check in so many processes; what each gave."""

    def run(count: int, check: Callable[[Peers], Result]) -> list[Result]:
        values: list[Any] = [None] * count
        barrier = threading.Barrier(count)
        with ThreadPoolExecutor(count) as pool:
            peers = [_Thread(number, values, barrier) for number in range(count)]
            return list(pool.map(check, peers))

    return run

"""Prefetch: ahead but bounded, honest about errors and waiting, and gone when it is over."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest
from support.clock import Clock, is_waiting
from support.waiting import HANG_SECONDS, until

from replicax.core import prefetch as module
from replicax.core.prefetch import Prefetch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "replicax-prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    assert not threads()
    yield
    assert until(lambda: not threads())


class Counter:
    """Counts what it has made."""

    def __init__(self, last: int) -> None:
        self.made = 0
        self._last = last

    def __call__(self) -> Iterator[int]:
        while self.made < self._last:
            self.made += 1
            yield self.made


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_items_come_in_order_and_end(depth: int) -> None:
    items = Prefetch(Counter(20), depth)
    assert list(items) == list(range(1, 21))
    assert list(items) == []


@pytest.mark.parametrize("depth", [1, 3])
def test_the_thread_is_at_most_depth_and_one_ahead(depth: int) -> None:
    counter = Counter(100)
    items = Prefetch(counter, depth)
    for taken in range(1, 6):
        assert next(items) == taken
        assert until(lambda taken=taken: counter.made == taken + depth + 1)
        time.sleep(0.01)
        assert counter.made == taken + depth + 1  # the queue, and the one that waits for room
    items.close()


def test_an_error_comes_where_its_item_would_have() -> None:
    def items() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the disk is gone")

    prefetch = Prefetch(items, 5)
    assert (next(prefetch), next(prefetch)) == (1, 2)
    with pytest.raises(OSError, match="the disk is gone"):
        next(prefetch)
    assert not threads()
    with pytest.raises(StopIteration):
        next(prefetch)


def test_breaking_off_ends_the_thread_and_the_source() -> None:
    closed = threading.Event()

    def items() -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.set()

    prefetch = Prefetch(items, 2)
    assert next(prefetch) == 0
    prefetch.close()
    assert not threads()
    assert until(closed.is_set)
    with pytest.raises(StopIteration):
        next(prefetch)


def test_forgetting_it_ends_the_thread() -> None:
    prefetch = Prefetch(Counter(10**9), 2)
    next(prefetch)
    assert threads()
    del prefetch
    gc.collect()
    assert until(lambda: not threads())


def test_closing_twice_is_closing() -> None:
    prefetch = Prefetch(Counter(3), 2)
    prefetch.close()
    prefetch.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_waiting_for_a_slow_source_is_counted(clock: Clock) -> None:
    consumer, taken = threading.current_thread(), threading.Semaphore(1)

    def items() -> Iterator[int]:
        for number in range(3):
            taken.acquire()
            until(lambda: is_waiting(consumer))
            clock.now += 0.05
            yield number

    prefetch = Prefetch(items, 2)
    for _ in prefetch:
        taken.release()
    assert prefetch.wait_seconds == pytest.approx(0.15)


def test_what_is_ready_costs_no_waiting(clock: Clock) -> None:
    def items() -> Iterator[int]:
        for number in range(3):
            clock.now += 10.0  # while nobody waits for it
            yield number
        made.set()

    made = threading.Event()
    prefetch = Prefetch(items, 3)
    assert made.wait(HANG_SECONDS)
    list(prefetch)
    assert prefetch.wait_seconds == 0.0

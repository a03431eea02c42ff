"""Prefetching in a thread: bounded, with errors passed on, and ended with its reader."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest
from support.waiting import Threads, until

from replicax.core.data.feed import prefetched


@pytest.fixture(autouse=True)
def _no_thread_is_left(prefetching: Threads) -> Iterator[None]:
    yield
    assert until(lambda: not prefetching())


class Counter:
    """Counts the items it has made."""

    def __init__(self, last: int) -> None:
        self.made = 0
        self._last = last

    def __call__(self, closing: threading.Event) -> Iterator[int]:
        while self.made < self._last:
            self.made += 1
            yield self.made


@pytest.mark.parametrize("depth", [1, 3])
def test_the_thread_is_at_most_depth_and_one_ahead(depth: int) -> None:
    counter = Counter(100)
    made = prefetched(counter, lambda: depth)
    for taken in range(1, 6):
        assert next(made) == taken
        assert until(lambda taken=taken: counter.made == taken + depth + 1)
        time.sleep(0.01)
        assert counter.made == taken + depth + 1  # the queue, and the one that waits for room
    made.close()


def test_with_no_depth_each_item_is_made_when_it_is_asked_for() -> None:
    counter = Counter(100)
    made = prefetched(counter, lambda: 0)
    for taken in range(1, 4):
        assert next(made) == taken
        time.sleep(0.01)
        assert counter.made == taken
    made.close()


def test_an_error_comes_where_its_item_would_have(prefetching: Threads) -> None:
    reason = "the disk is gone"

    def items(closing: threading.Event) -> Iterator[int]:
        yield 1
        yield 2
        raise OSError(reason)

    made = prefetched(items, lambda: 5)
    assert (next(made), next(made)) == (1, 2)
    with pytest.raises(OSError, match=reason):
        next(made)
    assert not prefetching()
    with pytest.raises(StopIteration):
        next(made)


def test_breaking_off_ends_the_thread_and_the_source(prefetching: Threads) -> None:
    closed = threading.Event()

    def items(closing: threading.Event) -> Iterator[int]:
        try:
            yield from range(10**9)
        finally:
            closed.set()

    made = prefetched(items, lambda: 2)
    assert next(made) == 0
    made.close()
    assert not prefetching()
    assert until(closed.is_set)
    with pytest.raises(StopIteration):
        next(made)


def test_forgetting_it_ends_the_thread(prefetching: Threads) -> None:
    made = prefetched(Counter(10**9), lambda: 2)
    next(made)
    assert prefetching()
    del made
    gc.collect()
    assert until(lambda: not prefetching())

"""Work ahead in a background thread, with a bounded queue and a clock on the waiting."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class _Done:
    """The end of the items, and the error that ended them, if one did."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class Prefetch(Generic[T]):
    """Iterates over `items()`, which runs in a thread at most `depth` items ahead.

    An error in the thread is raised where the item would have come. The thread ends with the
    iteration: exhausted, broken off (`close`), or forgotten.
    """

    def __init__(self, items: Callable[[], Iterator[T]], depth: int) -> None:
        self.wait_seconds = 0.0
        """Time that the consumer has waited for an item."""
        self._queue: queue.Queue[T | _Done] = queue.Queue(max(depth, 1))
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_produce,
            args=(items, self._queue, self._stop),
            name="replicax-prefetch",
            daemon=True,
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._stop.is_set():
            raise StopIteration
        started = time.perf_counter()
        item = self._queue.get()
        self.wait_seconds += time.perf_counter() - started
        if isinstance(item, _Done):
            self.close()
            if item.error is not None:
                raise item.error
            raise StopIteration
        return item

    def close(self) -> None:
        """End the thread and drop what it has made ahead."""
        self._stop.set()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._thread.join(timeout=5.0)  # a loader that hangs must not hang its reader

    def __del__(self) -> None:
        self._stop.set()


def _produce(
    items: Callable[[], Iterator[T]], out: "queue.Queue[T | _Done]", stop: threading.Event
) -> None:
    error: BaseException | None = None
    try:
        for item in items():
            if not _put(out, item, stop):
                return
    except BaseException as caught:  # it belongs to the consumer, whatever it is
        error = caught
    _put(out, _Done(error), stop)


def _put(out: "queue.Queue[T | _Done]", item: "T | _Done", stop: threading.Event) -> bool:
    """Put `item` unless the consumer has gone."""
    while not stop.is_set():
        try:
            out.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False

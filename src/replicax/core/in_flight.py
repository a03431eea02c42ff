"""The one tracker of the steps that were given to the devices."""

import collections
import itertools
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

STEPS_IN_FLIGHT = 4
"""How far the host runs ahead of the devices: far enough that they never wait for it, and near
enough that the batches of unfinished steps fit in memory. XLA's CPU backend admits 32 programs a
device; where several devices have a reduction in common, a host that goes on to the 33rd stops
them all for good."""

_PACES = 100
"""Step times remembered; their median is the usual one."""


class Result(Protocol):
    """An array that a step computes."""

    def is_ready(self) -> bool:
        """Return whether it is computed."""

    def block_until_ready(self) -> Any:
        """Wait until it is."""


class InFlight:
    """Follows the steps of a process in the order in which they are given to the devices.

    One thread adds steps and takes their notes; any other may `look` at any time.
    """

    def __init__(self) -> None:
        self.begun = 0
        """Steps given to the devices."""
        self.finished = 0
        """Steps that the devices have done, as far as the last `look` or wait has shown."""
        self.finished_at: float | None = None
        """When that was, on the monotonic clock."""
        self._unfinished: collections.deque[tuple[Result, list[Any]]] = collections.deque()
        self._untaken: collections.deque[Any] = collections.deque()
        self._paces: collections.deque[float] = collections.deque(maxlen=_PACES)
        self._lock = threading.Lock()

    def add(self, result: Result) -> None:
        """Add a step; wait for the oldest if more than `STEPS_IN_FLIGHT` are unfinished.

        Args:
            result: an array that the step computes; it is never donated.
        """
        with self._lock:
            self.begun += 1
            self._unfinished.append((result, []))
            self._count()
        while len(self._unfinished) > STEPS_IN_FLIGHT:
            self._wait()

    def note(self, note: Any) -> None:
        """Attach a note to the step that was added last; `notes` gives it back."""
        self._unfinished[-1][1].append(note)

    def notes(self, may_remain: int = STEPS_IN_FLIGHT) -> Iterator[Any]:
        """Take the notes of all steps but the last `may_remain`, oldest first, each once its step
        has finished.
        """
        while True:
            while self._untaken:
                yield self._untaken.popleft()
            if len(self._unfinished) <= may_remain:
                return
            self._wait()

    @property
    def remaining(self) -> list[Any]:
        """Notes that were not taken yet, oldest first."""
        return [*self._untaken, *(note for _, notes in self._unfinished for note in notes)]

    def forget(self) -> None:
        """Drop all notes."""
        self._untaken.clear()
        for _, notes in self._unfinished:
            notes.clear()

    @property
    def usual_seconds(self) -> float | None:
        """Median time of a step; None until two have finished."""
        paces = list(self._paces)  # another thread may add to them
        return statistics.median(paces) if paces else None

    def look(self) -> None:
        """Count the steps that have finished, without waiting for any."""
        with self._lock:
            self._count()

    def _count(self) -> None:
        # A host runs ahead of its devices, and then waits for many steps at once: only what is
        # finished tells how long a step takes, and that there is progress.
        waited_for = self.begun - len(self._unfinished)
        finished = max(self.finished, waited_for)
        for result, _ in itertools.islice(self._unfinished, finished - waited_for, None):
            if not _is_done(result):
                break
            finished += 1
        if finished > self.finished:
            now = time.monotonic()
            if self.finished_at is not None:
                self._paces.append((now - self.finished_at) / (finished - self.finished))
            self.finished, self.finished_at = finished, now

    def _wait(self) -> None:
        """Wait for the oldest step; raise what its devices raised."""
        result, notes = self._unfinished[0]
        try:
            result.block_until_ready()
        finally:
            with self._lock:
                self._unfinished.popleft()
            self._untaken.extend(notes)


def _is_done(result: Result) -> bool:
    try:
        return result.is_ready()
    except RuntimeError:  # deleted, hence done
        return True

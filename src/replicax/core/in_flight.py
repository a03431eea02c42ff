"""The one tracker of the steps that were given to the devices."""

import collections
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

STEPS_IN_FLIGHT = 4
"""How far the host runs ahead: far enough that the devices never wait for it, near enough that the
batches of unfinished steps fit in memory. XLA's CPU backend admits 32 programs a device; where
several have a reduction in common, a host that goes on to the 33rd stops them all for good."""


class InFlight:
    """Follows the steps of a process in the order in which they are given to the devices.

    One thread adds steps and takes their notes; any other may ask what has `finished`.
    """

    def __init__(self) -> None:
        self.begun = 0
        """Steps given to the devices."""
        self._waited_for = 0
        self._unfinished: collections.deque[Any] = collections.deque()
        self._notes: collections.deque[tuple[int, Any]] = collections.deque()
        self._lock = threading.Lock()
        self._met: Any = None

    @property
    def finished(self) -> int:
        """Steps that the devices have done."""
        with self._lock:
            ready = itertools.takewhile(_is_ready, self._unfinished)
            return self._waited_for + sum(1 for _ in ready)

    def add(self, result: Any) -> None:
        """Add the step that computes `result`, an array that is never donated.

        Wait for the oldest if more than `STEPS_IN_FLIGHT` are unfinished.
        """
        with self._lock:
            self.begun += 1
            self._unfinished.append(result)
        while len(self._unfinished) > STEPS_IN_FLIGHT:
            self._wait()

    def note(self, note: Any) -> None:
        """Attach a note to the step that was added last; `notes` gives it back."""
        self._notes.append((self.begun, note))

    def notes(self, may_remain: int = STEPS_IN_FLIGHT) -> Iterator[Any]:
        """Take the notes of all steps but the last `may_remain`, in order, once they finish."""
        while True:
            while self._notes and self._notes[0][0] <= self._waited_for:
                yield self._notes.popleft()[1]
            if len(self._unfinished) <= may_remain:
                return
            self._wait()

    @property
    def remaining(self) -> list[Any]:
        """Notes that were not taken yet, oldest first."""
        return [note for _, note in self._notes]

    def forget(self) -> None:
        """Drop all notes."""
        self._notes.clear()

    def meet(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Return what `run` gives to the devices, which wait in it for one another.

        The one before has to be done: two at once, each on some of the threads of XLA's CPU
        backend, may wait for ever.
        """
        if self._met is not None:
            self._met.block_until_ready()
        found = run()
        self._met = min(found, key=lambda leaf: leaf.nbytes)
        return found

    def _wait(self) -> None:
        """Wait for the oldest step; raise what its devices raised."""
        try:
            self._unfinished[0].block_until_ready()
        finally:
            with self._lock:
                self._unfinished.popleft()
                self._waited_for += 1


def _is_ready(result: Any) -> bool:
    try:
        return bool(result.is_ready())
    except RuntimeError:  # deleted, hence done
        return True

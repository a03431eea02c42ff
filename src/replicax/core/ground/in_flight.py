"""Track the steps dispatched to the devices."""

import collections
import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from replicax.errors import StateError

STEPS_IN_FLIGHT = 4
"""Maximum number of unfinished steps: enough that devices never wait for the host, few enough that
their batches fit in memory. XLA's CPU backend admits 32 programs per device; if several share a
reduction, a host that dispatches the 33rd deadlocks them all."""


class InFlight:
    """Track the steps of a process in the order of dispatch.

    A thread that adds steps holds `lock`; one takes their notes; any may read `finished`.
    """

    def __init__(self) -> None:
        self.begun = 0
        """Number of steps dispatched."""
        self.entered = 0
        """Number of steps dispatched or being dispatched; the last may wait for other processes."""
        self.waited_seconds = 0.0
        """Total time that this process waited, for calls to finish or for other processes."""
        self.lock = threading.RLock()
        """Held while a program is dispatched."""
        self._waited_for = self._noted = 0
        self._unfinished: collections.deque[tuple[Any, int]] = collections.deque()
        """The result of each call, and the number of steps begun with it."""
        self._notes: collections.deque[tuple[int, Any]] = collections.deque()
        self._lock = threading.Lock()
        self._met: Any = None
        self._is_followed = False

    @property
    def finished(self) -> int:
        """The number of steps finished by the devices."""
        with self._lock:
            ready = itertools.takewhile(_is_ready, self._unfinished)
            return max((begun for _, begun in ready), default=self._waited_for)

    def enter(self, steps: int = 1) -> None:
        """Note that a call of so many steps is about to be dispatched."""
        self.entered = self.begun + steps

    def add(self, result: Any, steps: int = 1) -> None:
        """Add the call of `steps` that computes `result`, an array that is never donated.

        Wait for the oldest if more than `STEPS_IN_FLIGHT` calls are unfinished.
        """
        with self._lock:
            self.begun += steps
            self._unfinished.append((result, self.begun))
        while len(self._unfinished) > STEPS_IN_FLIGHT:
            self._wait()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Enter a run, which takes the notes of all steps: there is one at a time."""
        if self._is_followed:
            raise StateError(
                "a run began while another of the same DataParallel or job is still open; a run "
                "takes the results of all steps: end the first, or use another DataParallel"
            )
        self._is_followed = True
        try:
            yield
        finally:
            self._is_followed = False

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the context as waited."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += time.perf_counter() - started

    def note(self, note: Any) -> None:
        """Attach a note to the last call added; `notes` returns it."""
        self._notes.append((self.begun, note))

    def notes(self, may_remain: int = STEPS_IN_FLIGHT) -> Iterator[Any]:
        """Yield the notes of all but the last `may_remain` calls, in order, as they finish."""
        while True:
            while self._notes and self._notes[0][0] <= self._waited_for:
                self._noted, note = self._notes.popleft()
                yield note
            if len(self._unfinished) <= may_remain:
                return
            self._wait()

    @property
    def finished_since(self) -> int:
        """The number of steps finished after those of the last note taken."""
        return self.finished - self._noted

    @property
    def remaining(self) -> list[Any]:
        """Notes not yet taken, oldest first."""
        return [note for _, note in self._notes]

    def forget(self) -> None:
        """Drop all notes."""
        self._notes.clear()

    def meet(self, run: Callable[[], list[Any]]) -> list[Any]:
        """Return the results of `run`, which dispatches programs that communicate.

        Wait for the previous one first: two at once, each on some of the threads of XLA's CPU
        backend, may deadlock.
        """
        if self._met is not None:
            self._met.block_until_ready()
        found = run()
        self._met = min(found, key=lambda leaf: leaf.nbytes)  # kept until the next: the smallest
        return found

    def drain(self) -> None:
        """Wait for all programs that were dispatched, but for those whose results are at hand."""
        for result in (*(result for result, _ in self._unfinished), self._met):
            if result is not None:
                result.block_until_ready()

    def _wait(self) -> None:
        """Wait for the oldest call; re-raise any error from its devices."""
        try:
            with self.waiting():
                self._unfinished[0][0].block_until_ready()
        finally:  # a call that failed ended as well: the next wait is for the one after it
            with self._lock:
                self._waited_for = self._unfinished.popleft()[1]


def _is_ready(call: tuple[Any, int]) -> bool:
    try:
        return bool(call[0].is_ready())
    except RuntimeError:  # deleted, so finished
        return True

"""Where this process stands: steps begun and done, what it does, and for how long already."""

import collections
import math
import statistics
import sys
import threading
import time
import traceback
from typing import NamedTuple

from replicax.cluster.patience import Patience
from replicax.core.in_flight import InFlight

_PACES = 100
"""Step times remembered; their median is the usual one."""


class Standing(NamedTuple):
    """State that a process reports to the others."""

    begun: int = 0
    """Steps given to the devices. The process that has the fewest keeps the others waiting."""
    finished: int = 0
    """Steps that the devices have done, as far as is known."""
    doing: str = "starting"
    """`starting`, `stepping`, `compiling`, `in a callback`, `idle`."""
    seconds: float = 0.0
    """Since it last made progress."""
    allowed_seconds: float = math.inf
    """How long it may go without; any time, until it tells."""

    def __str__(self) -> str:
        what = f"has begun {self.begun} steps and finished {self.finished}"
        return f"{what}, {self.doing} for {self.seconds:.1f} s"


class Pulse:
    """The heartbeat of this process: its training loop writes, and its link reads."""

    def __init__(self, in_flight: InFlight) -> None:
        self.in_flight = in_flight
        self._idle = False
        self._moved_at = time.monotonic()
        self._finished = 0, self._moved_at
        """Steps that the devices have done, and when that was noticed."""
        self._paces: collections.deque[float] = collections.deque(maxlen=_PACES)
        self._looking = threading.Lock()

    def move(self) -> None:
        """Report progress: a step was begun, a batch was evaluated."""
        self._idle = False
        self._moved_at = time.monotonic()
        self._look()  # a loop may be stuck before there were two beats

    def rest(self) -> None:
        """Report that the loop is over, or not yet begun: nobody is to be alarmed."""
        self._idle = True
        self._moved_at = time.monotonic()

    def forgive(self, seconds: float) -> None:
        """Leave out `seconds` in which the whole process stood still, and could not help it."""
        now = time.monotonic()
        self._moved_at = min(now, self._moved_at + seconds)

    def stand(self, patience: Patience) -> Standing:
        """Return where this process stands now."""
        finished, noticed_at = self._look()
        begun = self.in_flight.begun
        seconds = time.monotonic() - max(self._moved_at, noticed_at)
        doing = "idle" if self._idle else "stepping" if begun else "starting"
        if not self._idle and seconds > 1.0:
            doing = _inside() or doing
        paces = list(self._paces)  # another thread may add to them
        allowed = patience.allowed(statistics.median(paces) if paces else None)
        if doing in ("compiling", "starting"):
            allowed = max(allowed, patience.start_seconds)
        return Standing(begun, finished, doing, seconds, allowed)

    def _look(self) -> tuple[int, float]:
        """Return how many steps the devices have done, and when that was noticed; note their pace.

        A host runs ahead of its devices, and then waits for many steps at once: only what is
        finished tells how long a step takes, and that there is progress.
        """
        with self._looking:
            finished, now = self.in_flight.finished, time.monotonic()
            before, noticed_at = self._finished
            if finished > before:
                if before:
                    self._paces.append((now - noticed_at) / (finished - before))
                self._finished = finished, now
            return self._finished


def _inside() -> str | None:
    """Return what this process does by its stacks, where they tell."""
    files = {
        frame.f_code.co_filename
        for stack in sys._current_frames().values()
        for frame, _ in traceback.walk_stack(stack)
    }
    for place, doing in (
        ("jax/_src/compiler", "compiling"),
        ("jax/_src/callback", "in a callback"),
    ):
        if any(place in file for file in files):
            return doing
    return None

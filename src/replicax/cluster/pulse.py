"""Progress of this process: steps begun and finished, its current activity, and for how long."""

import collections
import statistics
import sys
import threading
import time
import traceback

from replicax.cluster.message import Typed
from replicax.cluster.patience import Patience
from replicax.core.ground.in_flight import InFlight

_PACES = 100
"""Number of recent step times kept; their median is the usual step time."""
NO_LIMIT_SECONDS = sys.float_info.max
"""An infinite timeout; JSON has no infinity."""


class Standing(Typed):
    """State that a process reports to the others, as its heartbeat."""

    begun: int = 0
    """Steps dispatched, or being dispatched. The process with the fewest blocks the others."""
    finished: int = 0
    """Steps that the devices are known to have finished."""
    doing: str = "starting"
    """`starting`, `stepping`, `compiling`, `in a callback`, `idle`."""
    seconds: float = 0.0
    """Time since its last progress."""
    allowed_seconds: float = NO_LIMIT_SECONDS
    """Timeout for progress; unlimited until the first report."""

    def __str__(self) -> str:
        what = f"has begun {self.begun} steps and finished {self.finished}"
        return f"{what}, {self.doing} for {self.seconds:.1f} s"


class Pulse:
    """The progress of this process, written by its training loop and read by its link."""

    def __init__(self, in_flight: InFlight) -> None:
        self.in_flight = in_flight
        self._idle = False
        self._moved_at = time.monotonic()
        self._finished = 0, self._moved_at
        """Steps that the devices have finished, and when that was noticed."""
        self._paces: collections.deque[float] = collections.deque(maxlen=_PACES)
        self._looking = threading.Lock()

    def move(self) -> None:
        """Report progress: a step was begun, or a batch evaluated."""
        self._idle = False
        self._moved_at = time.monotonic()
        self._look()  # a loop may get stuck before two heartbeats

    def rest(self) -> None:
        """Report that the loop is over, or has not begun: no timeout applies."""
        self._idle = True
        self._moved_at = time.monotonic()

    def forgive(self, seconds: float) -> None:
        """Exclude `seconds` during which the whole process was frozen."""
        now = time.monotonic()
        self._moved_at = min(now, self._moved_at + seconds)

    def stand(self, patience: Patience) -> Standing:
        """Return the current state of this process."""
        finished, noticed_at = self._look()
        begun = max(self.in_flight.entered, self.in_flight.begun)
        seconds = time.monotonic() - max(self._moved_at, noticed_at)
        doing = "idle" if self._idle else "stepping" if begun else "starting"
        if not self._idle and seconds > 1.0:
            doing = _inside() or doing
        paces = list(self._paces)  # another thread may add to them
        allowed = patience.allowed(statistics.median(paces) if paces else None)
        if doing in ("compiling", "starting"):
            allowed = max(allowed, patience.start_seconds)
        return Standing(begun, finished, doing, seconds, min(allowed, NO_LIMIT_SECONDS))

    def _look(self) -> tuple[int, float]:
        """Return the number of finished steps, and when that was noticed; record the step time.

        A host runs ahead of its devices, and then waits for many steps at once: only finished
        steps show progress and how long a step takes.
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
    """Return the activity of this process if its stack traces show it."""
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

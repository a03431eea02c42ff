"""Where this process stands: steps begun and done, what it does, and for how long already."""

import dataclasses
import math
import sys
import time
from typing import Any

from replicax.cluster.patience import Patience
from replicax.core.in_flight import InFlight


@dataclasses.dataclass(frozen=True)
class Standing:
    """What a process tells the others of itself."""

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
    """The heartbeat of this process: its training loop writes, and its link reads.

    Args:
        in_flight: the steps that it gives to the devices.
    """

    def __init__(self, in_flight: InFlight) -> None:
        self.in_flight = in_flight
        self._idle = False
        self._moved_at = time.monotonic()

    def move(self) -> None:
        """Report progress: a step was begun, a batch was evaluated."""
        self._idle = False
        self._moved_at = time.monotonic()

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
        steps = self.in_flight
        steps.look()
        seconds = time.monotonic() - max(self._moved_at, steps.finished_at or self._moved_at)
        doing = "idle" if self._idle else "stepping" if steps.begun else "starting"
        if not self._idle and seconds > 1.0:
            doing = _inside() or doing
        allowed = patience.allowed(steps.usual_seconds)
        if doing in ("compiling", "starting"):
            allowed = max(allowed, patience.start_seconds)
        return Standing(steps.begun, steps.finished, doing, seconds, allowed)


def _inside() -> str | None:
    """What the stacks of this process say that it does, where they say something."""
    stacks = [_files(frame) for frame in sys._current_frames().values()]
    for place, doing in (
        ("jax/_src/compiler", "compiling"),
        ("jax/_src/callback", "in a callback"),
    ):
        if any(place in file for files in stacks for file in files):
            return doing
    return None


def _files(frame: Any) -> list[str]:
    names = []
    while frame is not None:
        names.append(frame.f_code.co_filename)
        frame = frame.f_back
    return names

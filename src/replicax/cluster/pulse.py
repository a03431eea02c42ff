"""Where this process stands: steps begun and done, what it does, and for how long already."""

import collections
import dataclasses
import statistics
import sys
import time
from typing import Any

from replicax.cluster.patience import Patience

_INTERVALS = 100
"""Step times remembered; their median is the usual one."""


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
    allowed_seconds: float = 0.0
    """How long it may go without."""

    def __str__(self) -> str:
        what = f"has begun {self.begun} steps and finished {self.finished}"
        return f"{what}, {self.doing} for {self.seconds:.1f} s"


class Pulse:
    """Counts what the training loop does. One a process; the loop writes and the link reads."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything, as before the first step."""
        self._begun = self._known_finished = 0
        self._pending: collections.deque[tuple[int, Any]] = collections.deque(maxlen=16)
        self._intervals: collections.deque[float] = collections.deque(maxlen=_INTERVALS)
        self._idle = self._in_a_row = False
        self._moved_at = time.monotonic()
        self._started = False

    def step(self, result: Any) -> None:
        """A step was given to the devices; `result` is an array that it will compute."""
        self._begun += 1
        self._pending.append((self._begun, result))
        before, in_a_row = self._moved_at, self._in_a_row
        self.move()
        self._in_a_row = True
        if in_a_row:
            self._intervals.append(self._moved_at - before)

    def move(self) -> None:
        """Something else was got done: a batch was evaluated."""
        self._started, self._idle, self._in_a_row = True, False, False
        self._moved_at = time.monotonic()

    def rest(self) -> None:
        """The loop is over, or not yet begun: nobody is to be alarmed."""
        self._idle, self._in_a_row = True, False
        self._moved_at = time.monotonic()

    def stand(self, patience: Patience) -> Standing:
        """Where this process stands now."""
        seconds = time.monotonic() - self._moved_at
        doing = "idle" if self._idle else "stepping" if self._started else "starting"
        if not self._idle and seconds > 1.0:
            doing = _inside() or doing
        usual = statistics.median(self._intervals) if self._intervals else None
        allowed = patience.allowed(usual)
        if doing in ("compiling", "starting"):
            allowed = max(allowed, patience.start_seconds)
        return Standing(self._begun, self._finished(), doing, seconds, allowed)

    def _finished(self) -> int:
        while self._pending and _is_done(self._pending[0][1]):
            self._known_finished = self._pending.popleft()[0]
        return self._known_finished


def _is_done(array: Any) -> bool:
    try:
        return bool(array.is_ready())
    except RuntimeError:  # deleted, hence done
        return True


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


PULSE = Pulse()
"""Of this process."""

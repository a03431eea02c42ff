"""Where this process stands: steps begun and done, what it does, and for how long already."""

import collections
import dataclasses
import math
import statistics
import sys
import threading
import time
from typing import Any

from replicax.cluster.patience import Patience

_PACES = 100
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
    allowed_seconds: float = math.inf
    """How long it may go without; any time, until it tells."""

    def __str__(self) -> str:
        what = f"has begun {self.begun} steps and finished {self.finished}"
        return f"{what}, {self.doing} for {self.seconds:.1f} s"


class Pulse:
    """Counts what the training loop does. One a process; the loop writes and the link reads."""

    def __init__(self) -> None:
        self._looking = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything, as before the first step."""
        self._begun = self._finished = 0
        self._pending: collections.deque[tuple[int, Any]] = collections.deque()
        self._paces: collections.deque[float] = collections.deque(maxlen=_PACES)
        self._idle = self._started = False
        self._moved_at = time.monotonic()
        self._finished_at: float | None = None

    def step(self, result: Any) -> None:
        """A step was given to the devices; `result` is an array that it will compute."""
        self._begun += 1
        self._pending.append((self._begun, result))
        self.move()
        self._look()

    def move(self) -> None:
        """Something else was got done: a batch was evaluated."""
        self._started, self._idle = True, False
        self._moved_at = time.monotonic()

    def rest(self) -> None:
        """The loop is over, or not yet begun: nobody is to be alarmed."""
        self._idle = True
        self._moved_at = time.monotonic()

    def forgive(self, seconds: float) -> None:
        """The whole process stood still for `seconds`, which it cannot be blamed for."""
        now = time.monotonic()
        self._moved_at = min(now, self._moved_at + seconds)

    def stand(self, patience: Patience) -> Standing:
        """Where this process stands now."""
        self._look()
        seconds = time.monotonic() - max(self._moved_at, self._finished_at or self._moved_at)
        doing = "idle" if self._idle else "stepping" if self._started else "starting"
        if not self._idle and seconds > 1.0:
            doing = _inside() or doing
        paces = list(self._paces)  # another thread may add to them
        usual = statistics.median(paces) if paces else None
        allowed = patience.allowed(usual)
        if doing in ("compiling", "starting"):
            allowed = max(allowed, patience.start_seconds)
        return Standing(self._begun, self._finished, doing, seconds, allowed)

    def _look(self) -> None:
        """Count what the devices have done.

        The loop runs ahead of them, and then waits for many steps at once: only what is finished
        tells how long a step takes, and that there is progress.
        """
        with self._looking:
            finished = self._finished
            while self._pending and _is_done(self._pending[0][1]):
                finished, _ = self._pending.popleft()
            if finished == self._finished:
                return
            now = time.monotonic()
            if self._finished_at is not None:
                self._paces.append((now - self._finished_at) / (finished - self._finished))
            self._finished, self._finished_at = finished, now


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

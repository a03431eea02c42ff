"""How long exchanges and steps usually take, and so how long others may make no progress."""

import statistics
import time

from replicax.cluster.watchdog import Timeouts

_USUAL = 20
"""Number of recent exchanges, or moves, that tell the usual time."""


class Pace:
    """The pace of this island, which sets its patience with others."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.delayed_seconds = 0.0
        """How much longer than usual exchanges took in which the group changed."""
        self._timeouts, self._exchanges = timeouts, list[float]()
        self._moves, self._moved_at = list[float](), time.monotonic()

    def rest(self) -> None:
        """Note that no progress is expected until the next `move`."""
        self._moved_at = float("inf")

    def move(self) -> None:
        """Note progress: steps between two exchanges may take longer than any exchange."""
        now = time.monotonic()
        self._moves = [*self._moves[1 - _USUAL :], max(now - self._moved_at, 0.0)]
        self._moved_at = now

    def exchanged(self, seconds: float, *, changed: bool) -> None:
        """Note how long an exchange took; in those in which the group changed, it is a delay."""
        if changed and len(self._exchanges) > 1:
            self.delayed_seconds += max(seconds - statistics.median(self._exchanges), 0.0)
        else:
            self._exchanges = [*self._exchanges[-_USUAL:], seconds]

    def allowed(self, *, slow: bool) -> float:
        """Return how long others may make no progress; if `slow`, as at the start."""
        if slow or len(self._exchanges) < 2:
            return self._timeouts.allowed(None)
        usual = max(statistics.median(self._exchanges), *self._moves, 0.0)
        return self._timeouts.allowed(usual)

"""A clock that knows when this process was frozen: stopped by a signal, or with its host."""

import threading
import time


class StallClock:
    """A monotonic clock that counts at most `most_seconds` between two looks at it.

    A process that was frozen cannot tell whether others were silent meanwhile. Whoever measures
    their silence looks more often, from any thread.
    """

    def __init__(self, most_seconds: float) -> None:
        self.frozen_seconds = 0.0
        """How much time did not count."""
        self._most_seconds = most_seconds
        self._looked_at = time.monotonic()
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the seconds since some moment in the past in which this process was not frozen."""
        with self._lock:
            now = time.monotonic()
            self.frozen_seconds += max(now - self._looked_at - self._most_seconds, 0.0)
            self._looked_at = now
            return now - self.frozen_seconds

"""A fake clock, and a check of what a thread does."""

import dataclasses
import queue
import sys
import threading
from typing import Any

import pytest


@dataclasses.dataclass
class Clock:
    """Stands in for the module `time`."""

    now: float = 1000.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now


def clock_of(module: Any) -> Any:
    """Return a fixture: the clock that stands in for `time` in a module."""

    @pytest.fixture
    def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
        made = Clock()
        monkeypatch.setattr(module, "time", made)
        return made

    return clock


def is_waiting(thread: threading.Thread) -> bool:
    """Return whether `thread` is inside `Queue.get`."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code is queue.Queue.get.__code__:
            return True
        frame = frame.f_back
    return False

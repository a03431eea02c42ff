"""Waiting for events instead of the clock, so that no test depends on the load of the machine."""

import threading
import time
from collections.abc import Callable
from typing import Any

HANG_SECONDS = 240.0
"""Bounds waits for events that must come, so that a test of broken code ends."""

Threads = Callable[[], list[threading.Thread]]
"""The fixture `prefetching`."""


def until(true: Callable[[], Any], seconds: float = HANG_SECONDS) -> Any:
    """Return the result of `true` once it is true; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
    return value


def within(seconds: float, attempt: Callable[[], float], attempts: int = 5) -> None:
    """Assert that one of several attempts takes less than `seconds`, which each returns.

    Others at work on the machine only lengthen one: the shortest tells what the code takes.
    """
    taken: list[float] = []
    while not taken or min(taken) >= seconds:
        assert len(taken) < attempts, f"{min(taken):.2f} s at best; at most {seconds:g} s"
        taken.append(attempt())

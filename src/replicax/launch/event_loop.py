"""One loop for everything that a launcher waits for: outputs, ends, signals and due actions."""

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from replicax.launch.cause import Ended, posix_signal_name
from replicax.launch.echo import Echo, Output
from replicax.launch.guard import PASSED, STOPPING
from replicax.launch.process import RunningProcess

POLL_SECONDS = 0.05
READ_BYTES = 1 << 16


@contextlib.contextmanager
def collected_signals() -> Iterator[int]:
    """Yield a descriptor from which incoming signals in `PASSED` can be read, a byte each.

    They have no other effect. Ignored signals stay ignored, such as SIGHUP under `nohup`. Outside
    the main thread, where Python delivers no signals, none are collected.
    """
    with contextlib.ExitStack() as undone:
        collected, collects = os.pipe()
        for end in (collected, collects):  # a flood of signals must not block their handler
            os.set_blocking(end, False)
            undone.callback(os.close, end)
        if threading.current_thread() is threading.main_thread():
            woken = signal.set_wakeup_fd(collects, warn_on_full_buffer=False)
            undone.callback(signal.set_wakeup_fd, woken)
            for number in PASSED:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    # Without a handler in Python, none of its bytes are written.
                    before = signal.signal(number, lambda *_: None)
                    undone.callback(signal.signal, number, before)
        yield collected


def signals_taken(signals: int) -> list[int]:
    """Return the signals that `collected_signals` has collected since the last call."""
    with contextlib.suppress(BlockingIOError):
        return [number for number in os.read(signals, 4096) if number in PASSED]
    return []


class EventLoop:
    """Waits for what running processes say, and forwards signals to all of them.

    `signals` is the descriptor from `collected_signals`; after a SIGINT or one of `STOPPING`, which
    is forwarded as SIGTERM, the processes have `grace_seconds` to exit.
    """

    def __init__(self, echo: Echo, signals: int, grace_seconds: float) -> None:
        self.echo, self.grace_seconds = echo, grace_seconds
        self.stopped_by: int | None = None
        """The signal that ends everything, if any."""
        self.passed: set[int] = set()
        """Signals that were forwarded."""
        self.due: dict[Callable[[], None], float] = {}
        """Scheduled actions, and their times on the clock of `time.monotonic`."""
        self.listening: dict[RunningProcess, Callable[[RunningProcess], None]] = {}
        """Running processes, and what is called when there is something to listen to."""
        self.reading: dict[int, Output] = {}
        """Open streams of running processes, by descriptor."""
        self._signals = signals

    def turn(self) -> None:
        """Wait for an event, and handle it."""
        actions: dict[int, Callable[[], None]] = {self._signals: self._pass_on}
        actions |= {
            process.channel: partial(listen, process) for process, listen in self.listening.items()
        }
        if not self.echo.full:  # otherwise the processes block until the output is written
            actions |= {stream: partial(self._read, stream) for stream in self.reading}
        poll = select.poll()
        for descriptor in actions:
            poll.register(descriptor, select.POLLIN)
        if (shown_on := self.echo.waiting_for) is not None:
            poll.register(shown_on, select.POLLOUT)
            actions[shown_on] = self.echo.write
        waits = [max(at - time.monotonic(), 0) for at in self.due.values()]
        waits += [POLL_SECONDS] if self.echo.full else []
        # In whole milliseconds, rounded up: too early, nothing would be due.
        for descriptor, _ in poll.poll(math.ceil(1000 * min(waits)) if waits else None):
            actions[descriptor]()
        if self.echo.closed and self.stopped_by is None:
            self._stop(signal.SIGPIPE, signal.SIGTERM)
        now = time.monotonic()
        for action in [action for action, at in self.due.items() if at <= now]:
            if self.due.pop(action, None) is not None:  # an earlier one may have cancelled it
                action()

    @property
    def told(self) -> bool:
        """Whether this launcher received a signal to stop, or to pass on."""
        return self.stopped_by is not None or bool(self.passed)

    def natural(self, end: Ended) -> bool:
        """Return whether a process ended as requested: by a forwarded signal, or by force."""
        statuses = {-number for number in self.passed} | {128 + number for number in self.passed}
        return end.well or end.forced or end.status in statuses

    def send(self, number: int) -> None:
        """Forward a signal to all processes that are left; also from another thread."""
        self.passed.add(number)
        for process in tuple(self.listening):  # which the loop's own thread may change meanwhile
            process.send(number)

    def kill_all(self) -> None:
        """Kill all processes that are left."""
        for process in self.listening:
            process.stop(signal.SIGKILL)

    def _read(self, stream: int) -> None:
        if data := os.read(stream, READ_BYTES):
            self.reading[stream].feed(data)
        else:
            self.reading.pop(stream).end()

    def _pass_on(self) -> None:
        """Forward the signals that this launcher received; a second Ctrl-C kills all at once."""
        for number in signals_taken(self._signals):
            if number == signal.SIGINT and self.stopped_by in (signal.SIGINT, *STOPPING):
                self.due[self.kill_all] = time.monotonic()
                self.echo.hurry()
            elif number == signal.SIGINT:
                self._stop(number, number)
            elif number in STOPPING:  # SIGHUP comes from a terminal that closes
                self._stop(number, signal.SIGTERM)
            else:
                self.send(number)

    def _stop(self, why: int, number: int) -> None:
        first = self.stopped_by is None
        self.stopped_by = self.stopped_by or why
        self.send(number)
        self.due.setdefault(self.kill_all, time.monotonic() + self.grace_seconds)
        if first and why != signal.SIGPIPE:
            self.echo.say(
                f"replicax: {posix_signal_name(why)} forwarded; all have {self.grace_seconds:g} s "
                "to exit, Ctrl-C kills them now",
                error=True,
            )

"""One attempt to run a job: start all processes and supervise them until the last is gone."""

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from replicax.cluster.differences import processes_text
from replicax.cluster.watchdog import SAVED
from replicax.errors import ClusterError
from replicax.launch.cause import Ended, posix_signal_name
from replicax.launch.echo import Echo, Output
from replicax.launch.guard import PASSED, STOPPING
from replicax.launch.process import Process, ProcessStart

# After the first failure: the others first get time to print why they end, then SIGTERM, then
# SIGKILL. All are gone within 2 seconds.
TERM_SECONDS = 1.0
KILL_SECONDS = 1.4
DRAIN_SECONDS = 0.5
_POLL_SECONDS = 0.05
READ_BYTES = 1 << 16


@contextlib.contextmanager
def collected_signals() -> Iterator[int]:
    """Yield a descriptor from which incoming signals in `PASSED` can be read, a byte each.

    They have no other effect. Ignored signals stay ignored, such as SIGHUP under `nohup`. Outside
    the main thread, where Python delivers no signals, none are collected.
    """
    with contextlib.ExitStack() as undone:
        collected, collects = os.pipe()
        for end in (collected, collects):
            os.set_blocking(end, False)
            undone.callback(os.close, end)
        if threading.current_thread() is threading.main_thread():
            woken = signal.set_wakeup_fd(collects, warn_on_full_buffer=False)
            undone.callback(signal.set_wakeup_fd, woken)
            for number in PASSED:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    before = signal.signal(number, lambda *_: None)
                    undone.callback(signal.signal, number, before)
        yield collected


def signals_taken(signals: int) -> list[int]:
    """Return the signals that `collected_signals` has collected since the last call."""
    with contextlib.suppress(BlockingIOError):
        return [number for number in os.read(signals, 4096) if number in PASSED]
    return []


class Attempt:
    """Starts all processes and supervises them.

    `signals` is the descriptor from `collected_signals`; after a SIGINT or one of `STOPPING`, which
    is forwarded as SIGTERM, the processes have `grace_seconds` to exit.
    """

    def __init__(
        self, starts: Sequence[ProcessStart], echo: Echo, signals: int, grace_seconds: float
    ) -> None:
        self.stopped_by: int | None = None
        self._starts, self._echo, self._signals = starts, echo, signals
        self._grace = grace_seconds
        self._passed: set[int] = set()
        self._due: dict[Callable[[], None], float] = {}
        """Scheduled actions, and their times on the clock of `time.monotonic`."""
        self._processes: list[Process] = []
        self._listening: set[Process] = set()
        self._reading: dict[int, Output] = {}

    def run(self) -> list[Ended]:
        """Return how each process ended, once all are gone.

        Raises:
            ClusterError: the system cannot start that many processes.
        """
        try:
            for start in self._starts:
                try:
                    process = Process(start, self._echo)
                except OSError as error:
                    raise ClusterError(
                        f"process {start.number} of {len(self._starts)} cannot be started: "
                        f"{error.strerror}; start fewer, or raise the limit (ulimit -n, ulimit -u)"
                    ) from error
                self._processes.append(process)
                self._listening.add(process)
                self._reading |= process.streams
            while self._listening or self._reading:
                self._turn()
        finally:  # even after an error, nothing is left running
            for process in self._processes:
                process.stop(signal.SIGKILL)
                process.close()
        return [process.ended() for process in self._processes]

    @property
    def told(self) -> bool:
        """Whether this launcher received a signal to stop, or to pass on."""
        return self.stopped_by is not None or bool(self._passed)

    def natural(self, end: Ended) -> bool:
        """Return whether a process ended as requested: by a forwarded signal, or by force."""
        told = {-number for number in self._passed} | {128 + number for number in self._passed}
        return end.well or end.forced or end.status in told

    def _turn(self) -> None:
        """Wait for an event, and handle it."""
        actions: dict[int, Callable[[], None]] = {self._signals: self._pass_on}
        actions |= {each.channel: partial(self._listen, each) for each in self._listening}
        if not self._echo.full:  # otherwise the processes block until the output is written
            actions |= {stream: partial(self._read, stream) for stream in self._reading}
        poll = select.poll()
        for descriptor in actions:
            poll.register(descriptor, select.POLLIN)
        if (shown_on := self._echo.waiting_for) is not None:
            poll.register(shown_on, select.POLLOUT)
            actions[shown_on] = self._echo.write
        waits = [max(at - time.monotonic(), 0) for at in self._due.values()]
        waits += [_POLL_SECONDS] if self._echo.full else []
        for descriptor, _ in poll.poll(math.ceil(1000 * min(waits)) if waits else None):
            actions[descriptor]()
        if self._echo.closed and self.stopped_by is None:
            self._stop(signal.SIGPIPE, signal.SIGTERM)
        now = time.monotonic()
        for action in [action for action, at in self._due.items() if at <= now]:
            del self._due[action]
            action()

    def _read(self, stream: int) -> None:
        if data := os.read(stream, READ_BYTES):
            self._reading[stream].feed(data)
        else:
            self._reading.pop(stream).end()

    def _listen(self, process: Process) -> None:
        known, now = process.status is not None, time.monotonic()
        if not process.listen():
            self._listening.discard(process)
            if not self._listening:  # an escaped process may hold the streams open forever
                self._due[self._stop_reading] = now + DRAIN_SECONDS
        if known or process.status is None or process.forced:
            return
        if process.status == SAVED:
            self._due.setdefault(self._end_alone, now + self._grace)  # the others should follow
        elif process.status != 0:
            if -process.status in self._passed and self.stopped_by is None:
                self.stopped_by = -process.status
            if self._kill_left not in self._due:
                self._due[self._end_left] = now + TERM_SECONDS
                self._due[self._kill_left] = now + KILL_SECONDS

    def _pass_on(self) -> None:
        """Forward the signals that this launcher received; a second Ctrl-C kills all at once."""
        for number in signals_taken(self._signals):
            if number == signal.SIGINT and self.stopped_by in (signal.SIGINT, *STOPPING):
                self._due[self._kill_left] = time.monotonic()
                self._echo.hurry()
            elif number == signal.SIGINT:
                self._stop(number, number)
            elif number in STOPPING:  # SIGHUP comes from a terminal that closes
                self._stop(number, signal.SIGTERM)
            else:
                self._send(number)

    def _stop(self, why: int, number: int) -> None:
        first = self.stopped_by is None
        self.stopped_by = self.stopped_by or why
        self._send(number)
        self._due.setdefault(self._kill_left, time.monotonic() + self._grace)
        if first and why != signal.SIGPIPE:
            self._echo.say(
                f"replicax: {posix_signal_name(why)} forwarded; all have {self._grace:g} s to "
                "exit, Ctrl-C kills them now",
                error=True,
            )

    def _send(self, number: int) -> None:
        self._passed.add(number)
        for process in self._processes:
            process.send(number)

    def _end_alone(self) -> None:
        """Terminate the processes that did not stop early with the others, and name them."""
        left = [each.start.number for each in self._processes if each.status is None]
        if left and self._kill_left not in self._due:
            self._due[self._kill_left] = time.monotonic() + self._grace
            self._end_left()
            self._echo.say(
                f"replicax: the others stopped early; SIGTERM to {processes_text(left)}, which "
                f"{'has' if len(left) == 1 else 'have'} {self._grace:g} s to exit",
                error=True,
            )

    def _end_left(self) -> None:
        for process in self._listening:
            process.stop(signal.SIGTERM)

    def _kill_left(self) -> None:
        self._due.pop(self._end_left, None)
        for process in self._listening:
            process.stop(signal.SIGKILL)

    def _stop_reading(self) -> None:
        if self._echo.full:  # not all of the output has been read
            self._due[self._stop_reading] = time.monotonic() + _POLL_SECONDS
            return
        while self._reading:
            self._reading.popitem()[1].end()

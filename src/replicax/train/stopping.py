"""Signals and other wishes to stop, save or evaluate."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from replicax.core.job import Job

_BETWEEN_VOTES_SECONDS = 0.5


class Interrupt:
    """Within this context the first SIGINT or SIGTERM sets `wanted`.

    A second SIGINT interrupts at once. A second SIGTERM changes nothing: whoever cannot wait sends
    SIGKILL. Of several contexts within each other the innermost acts on a signal, and the others
    know that it came. Outside the main thread, where Python hands out no signals, and for a signal
    that is ignored, it does nothing; in a process that is forked from this one neither.

    Args:
        terminate: whether SIGTERM counts too.
        at_once: called once with the signal, in another thread, where the first comes while nothing
            is held, even while the main thread is inside a compiler, where Python's own handlers
            do not run. It normally ends the process.
    """

    def __init__(
        self, *, terminate: bool = True, at_once: Callable[[int], None] | None = None
    ) -> None:
        self.signal: int | None = None
        """The first that came."""
        self._numbers = [signal.SIGINT, signal.SIGTERM] if terminate else [signal.SIGINT]
        self._at_once = at_once
        self._previous: dict[int, object] = {}
        self._pressed = False  # whether SIGINT came
        self._held = self._answered = False
        self._answering = threading.Lock()
        self._wake: socket.socket | None = None
        self._previous_wake = -1
        self._watching: threading.Thread | None = None

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    def hold(self) -> None:
        """From now on there is something that a signal must not throw away.

        It does not return while `at_once` runs, and runs it where a signal is not yet answered.
        """
        with self._answering:
            if self.signal is not None and self._wake is not None:
                self._answer(self.signal)
            self._held = True

    def let_go(self) -> None:
        with self._answering:
            self._held = False

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self._numbers:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:  # as SIGINT for a job in the background
                self._previous[number] = before
        if self._previous and self._at_once is not None:
            # Another thread hears of each signal: what the system calls writes to a socket.
            ear, self._wake = socket.socketpair()
            self._wake.setblocking(False)
            wake = self._wake.fileno()
            self._previous_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
            self._watching = threading.Thread(
                target=self._hear, args=[ear], name="replicax-signals", daemon=True
            )
            self._watching.start()
        for taken in self._previous:
            signal.signal(taken, self._note)
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _open:
            _open.remove(self)
            self._restore()
        if self._wake is not None and self._watching is not None:
            self._wake.shutdown(socket.SHUT_RDWR)  # a child may have it too
            self._watching.join()
            self._wake.close()
            self._wake = self._watching = None

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._wake is not None:
            signal.set_wakeup_fd(self._previous_wake, warn_on_full_buffer=False)

    def _hear(self, ear: socket.socket) -> None:
        with ear:
            while numbers := ear.recv(4096):
                for number in numbers:
                    # Else it is no signal of ours, or that of a context within this one.
                    if signal.getsignal(number) == self._note:
                        self.signal = self.signal or number
                        with self._answering:
                            self._answer(number)

    def _answer(self, number: int) -> None:
        answered, self._answered = self._answered, True
        if not answered and not self._held and self._at_once is not None:
            self._at_once(number)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # Without the lock: this thread may be interrupted while it has it.
        again = number == signal.SIGINT and self._pressed
        self._pressed = self._pressed or number == signal.SIGINT
        for each in _open[: _open.index(self)] if self in _open else []:
            each.signal, each._answered = each.signal or number, True
        self.signal = self.signal or number
        if again:
            raise KeyboardInterrupt


_open: list[Interrupt] = []  # from the outermost to the innermost


def signal_name(number: int) -> str:
    """Usual name of a signal: `Ctrl-C`, `SIGTERM`."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _after_fork() -> None:
    """In a child: a SIGTERM that is meant for it ends it, and is not told to its parent."""
    while _open:
        _open.pop()._restore()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


class Stopping:
    """Turns what reached some process, at whatever step, into one decision of all.

    That is a signal, or what a hook asks for. Processes vote at calls agreed on in the vote before,
    about two times a second, so that nobody goes on to a step that another one has left out.
    """

    def __init__(
        self, interrupt: Interrupt, job: Job, save_every_seconds: float | None = None
    ) -> None:
        self.save_due = False
        """Whether all are to save now; until they have."""
        self.evaluation_due = False
        """Whether all are to evaluate now, as some hook asked for; until they have."""
        self.why: str | None = None
        """Why the run ends here as if it were done, where some hook asked for that."""
        self._asked: dict[str, Any] = {"stop": None, "save": False, "evaluate": False}
        self._interrupt, self._job, self._save_every = interrupt, job, save_every_seconds
        self._saved_at = time.monotonic()
        self._decided: int | None = None
        self._calls = 0
        self._unit = ""
        self._vote_at = self._span = 1
        self._voted_at, self._voted_call = time.monotonic(), 0

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    @property
    def signal(self) -> int | None:
        """The signal because of which all stop, as far as it is decided."""
        return self._interrupt.signal if self._job.processes == 1 else self._decided

    @property
    def over(self) -> bool:
        """Whether there is to be no further step, because of a signal or of a hook."""
        return self.wanted or self.why is not None

    def stop(self, why: str) -> None:
        self._asked["stop"] = self._asked["stop"] or why

    def save(self) -> None:
        self._asked["save"] = True

    def evaluate(self) -> None:
        self._asked["evaluate"] = True

    def saved(self) -> None:
        """All have saved, or begun to: the time to the next save runs from here."""
        self.save_due = False
        self._saved_at = time.monotonic()

    def vote(self, *, unit: str = "step", now: bool = False) -> bool:
        """Whether there is to be no further step; all ask equally often, in the same order.

        Args:
            unit: what was done since the last call, a step or `batch` of an evaluation: how long
                one takes says nothing about the other.
            now: whether to vote on what was asked for in any case, where all are known to be at the
                same place.
        """
        self._calls += 1
        if self._job.processes == 1:
            self._decide([self._mine(now)])
        elif not self.over and (now or self._calls >= self._vote_at or unit != self._unit):
            mine = {**self._mine(now), "next": self._next()}
            if unit != self._unit:
                self._span = mine["next"] = 1
            votes = self._job.gather("whether to stop", mine)
            self._decide(votes)
            self._vote_at = self._calls + votes[0]["next"]
        self._unit = unit
        return self.over

    def _mine(self, now: bool) -> dict[str, Any]:
        clock = not now and self._is_time()
        mine = {"signal": self._interrupt.signal, "clock": clock, **self._asked}
        self._asked |= {"save": False, "evaluate": False}
        return mine

    def _decide(self, votes: list[dict[str, Any]]) -> None:
        self._decided = next((v["signal"] for v in votes if v["signal"] is not None), None)
        self.why = next((v["stop"] for v in votes if v["stop"] is not None), None)
        self.save_due |= votes[0]["clock"] or any(vote["save"] for vote in votes)
        self.evaluation_due |= any(vote["evaluate"] for vote in votes)

    def _is_time(self) -> bool:
        every = self._save_every
        return every is not None and time.monotonic() - self._saved_at >= every

    def _next(self) -> int:
        """How many calls from here about `_BETWEEN_VOTES_SECONDS` will have passed.

        At most twice as many as last time: the first steps are given to devices that are still
        free, and seem to take no time.
        """
        now = time.monotonic()
        each = (now - self._voted_at) / max(self._calls - self._voted_call, 1)
        self._voted_at, self._voted_call = now, self._calls
        wanted = max(1, round(_BETWEEN_VOTES_SECONDS / max(each, 1e-6)))
        self._span = min(wanted, 2 * self._span)
        return self._span

"""Signals and other requests to stop, save or evaluate."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from replicax.core.ground.job import Job
from replicax.islands.island_job import AllIslands
from replicax.text.arguments import typed
from replicax.train.run.stragglers import NO_TIMES, VoteTimes

_BETWEEN_VOTES_SECONDS = 0.5
_FIRST_SAVE_SECONDS = 60.0
"""A start saves first after this time, if not earlier: a killed one loses no more of its begin."""
_VOTES_BEFORE_LEAVING = 3
"""A signal reaches all islands within this many votes, if it is for all."""


_TERMINATING = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)
"""SIGHUP comes from a terminal that closes. Windows has only the first."""


class Interrupt:
    """A context in which the first SIGINT, SIGTERM, SIGHUP or SIGQUIT sets `wanted`.

    A run with an `interrupt` of your own returns after such a signal instead of raising; it opens
    the context if you have not.

    A second SIGINT interrupts at once. A second one of the others has no effect; use SIGKILL to end
    the process immediately. Of nested contexts the innermost handles a signal, and the others
    record it. The context does nothing outside the main thread, where Python delivers no signals,
    for signals that are ignored, such as SIGHUP under `nohup`, and in forked child processes.

    Examples:
        >>> settings = {"batch_size": 32, "epochs": 2, "interrupt": rx.types.Interrupt()}
        >>> result = rx.fit(dp, state, source, **settings)
        >>> if not result.interrupted:
        ...     weights = dp.model(result.state)

    Args:
        terminate: whether to handle the signals other than SIGINT.
        at_once: called once with the signal, in another thread, if the first signal arrives while
            `hold` is not in effect, even while the main thread is inside a compiler, where Python
            signal handlers do not run. It normally ends the process.
    """

    @typed
    def __init__(
        self, *, terminate: bool = True, at_once: Callable[[int], None] | None = None
    ) -> None:
        self.signal: int | None = None
        """The first signal received."""
        self._numbers = [signal.SIGINT, *(_TERMINATING if terminate else ())]
        self._at_once = at_once
        self._previous: dict[int, object] = {}
        self._pressed = False  # whether SIGINT was received
        self._held = self._answered = False
        self._answering = threading.Lock()
        self._wake: socket.socket | None = None
        self._previous_wake = -1
        self._watching: threading.Thread | None = None

    @property
    def wanted(self) -> bool:
        """Whether a signal was received."""
        return self.signal is not None

    @property
    def is_open(self) -> bool:
        """Whether this handles signals now."""
        return self in _open

    def hold(self) -> None:
        """Mark that from now on there is work that a signal must not discard.

        It does not return while `at_once` runs, and calls it for a signal not handled yet.
        """
        with self._answering:
            if self.signal is not None and self._wake is not None:
                self._answer(self.signal)
            self._held = True

    def let_go(self) -> None:
        """Mark that there is no such work any more."""
        with self._answering:
            self._held = False

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in self._numbers:
            before = signal.getsignal(number)
            # SIGINT is ignored in a background job; None is a handler that is not of Python.
            if before not in (signal.SIG_IGN, None):
                self._previous[number] = before
        if self._previous and self._at_once is not None:
            # Another thread learns of each signal: Python's C handler writes to a socket.
            ear, self._wake = socket.socketpair()
            self._wake.setblocking(False)
            wake = self._wake.fileno()
            self._previous_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
            self._watching = threading.Thread(
                target=self._hear, args=[ear], name="replicax-signals", daemon=True
            )
            self._watching.start()
        for handled in self._previous:
            signal.signal(handled, self._note)
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        if self in _open:
            _open.remove(self)
            self._restore()  # before the socket closes, to which the C handler writes
        if self._wake is not None and self._watching is not None:
            self._wake.shutdown(socket.SHUT_RDWR)  # a child process may share it
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
                    # Otherwise it is not handled here, or belongs to a context within this one.
                    if signal.getsignal(number) == self._note:
                        self.signal = self.signal or number
                        with self._answering:
                            self._answer(number)

    def _answer(self, number: int) -> None:
        answered, self._answered = self._answered, True
        if not answered and not self._held and self._at_once is not None:
            self._at_once(number)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # Without the lock, which this thread may hold when it is interrupted.
        again = number == signal.SIGINT and self._pressed
        self._pressed = self._pressed or number == signal.SIGINT
        for outer in _open[: _open.index(self)] if self in _open else []:
            outer.signal, outer._answered = outer.signal or number, True
        self.signal = self.signal or number
        if again:
            raise KeyboardInterrupt


_open: list[Interrupt] = []  # from the outermost to the innermost


def is_any_open() -> bool:
    """Whether some `Interrupt` handles signals, whose owner then decides what follows."""
    return bool(_open)


def shown_signal(number: int) -> str:
    """Return the usual name of a signal: `Ctrl-C`, `SIGTERM`."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _after_fork() -> None:
    """Restore the signal handlers in a forked child, so that its own SIGTERM ends it."""
    while _open:
        _open.pop()._restore()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)


class Stopping:
    """Turn requests that any process received at any step into one decision of all processes.

    Requests are signals and calls by hooks. Processes vote about twice a second, at a call agreed
    on in the previous vote, so that no process starts a step that another one skips.

    With `islands`, a signal stops all only if all have received one. There are no votes unless all
    are `at_boundary`, between two rounds.
    """

    def __init__(
        self,
        interrupt: Interrupt,
        job: Job,
        save_every_seconds: float | None = None,
        *,
        islands: AllIslands | None = None,
        at_boundary: Callable[[], bool] = lambda: True,
        times: VoteTimes = NO_TIMES,
    ) -> None:
        self.save_due = False
        """Whether all processes must save now; reset when they have."""
        self.evaluation_due = False
        """Whether all processes must evaluate now, requested by a hook; reset when done."""
        self.hook_reason: str | None = None
        """Why a hook ended the run, as all processes have decided; None if none did."""
        self.leaves: str | None = None
        """The signal on which this process leaves the others, which go on."""
        self._islands, self._signalled_votes, self._at_boundary = islands, 0, at_boundary
        self._times = times
        self._asked: dict[str, Any] = {"stop": None, "save": False, "evaluate": False}
        self._interrupt, self._job, self._save_every = interrupt, job, save_every_seconds
        self._saved_at, self._has_saved = time.monotonic(), False
        self._decided: int | None = None
        self._calls = 0
        self._unit = ""
        self._vote_at = self._span = 1
        self._voted_at, self._voted_call = time.monotonic(), 0

    @property
    def interrupted(self) -> bool:
        """Whether all processes have decided to stop on a signal."""
        return self.signal is not None

    @property
    def signal(self) -> int | None:
        """The signal on which all processes have decided to stop, if any."""
        return self._interrupt.signal if self._job.processes == 1 else self._decided

    @property
    def is_ending(self) -> bool:
        """Whether to do no further steps, because of a signal or a hook."""
        return self.interrupted or self.hook_reason is not None

    def stop(self, why: str) -> None:
        self._asked["stop"] = self._asked["stop"] or why

    def save(self) -> None:
        self._asked["save"] = True

    def evaluate(self) -> None:
        self._asked["evaluate"] = True

    def saved(self) -> None:
        """Note that all processes have started to save; the next save is timed from here."""
        self.save_due = False
        self._saved_at, self._has_saved = time.monotonic(), True

    def save_state(self) -> dict[str, Any]:
        """Return what was decided, and when the next vote is."""
        asked = {
            "save": self.save_due,
            "evaluate": self.evaluation_due,
            "hook_reason": self.hook_reason,
        }
        next_vote = self._vote_at - self._calls
        return {**asked, "signal": self._decided, "next": next_vote, "span": self._span}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue as the process that saved this, from the same position."""
        self.save_due, self.evaluation_due = state["save"], state["evaluate"]
        self.hook_reason, self._decided, self._unit = state["hook_reason"], state["signal"], "step"
        self._vote_at, self._span = self._calls + state["next"], state["span"]

    def vote(self, *, unit: str = "step", now: bool = False, admits: bool = False) -> bool:
        """Vote if due; return whether to stop. All processes must make the same calls in order.

        Args:
            unit: unit of work since the last call, a step or a `batch` of an evaluation; the two
                are timed separately.
            now: whether to vote on requests in any case, if all processes are known to be at the
                same position.
            admits: whether new islands may join here.
        """
        if not self._at_boundary():
            return self.is_ending
        self._calls += 1
        if self._job.processes == 1:
            clock = not now and self._is_time()
            if clock or self._interrupt.wanted or any(self._asked.values()):
                self._decide([self._mine(clock)])
        elif not self.is_ending and (now or self._calls >= self._vote_at or unit != self._unit):
            clock = not now and self._is_time()
            mine = {**self._mine(clock), "next": self._next(), "took": self._times.mine()}
            if unit != self._unit:  # how long one takes is not known yet
                self._span = mine["next"] = 1
            if self._islands is None:
                votes = self._job.gather("whether to stop", mine)
            else:
                votes = self._islands.gather("whether to stop", mine, admits=admits)
            self._decide(votes)
            self._times.heard([vote["took"] for vote in votes])
            self._times.vote_ended()
            # The clock of one process says when, as those of others run differently.
            self._vote_at = self._calls + votes[0]["next"]
        self._unit = unit
        return self.is_ending

    def _mine(self, clock: bool) -> dict[str, Any]:
        mine = {"signal": self._interrupt.signal, "clock": clock, **self._asked}
        # A request to stop stays, as each vote decides on it anew.
        self._asked |= {"save": False, "evaluate": False}
        return mine

    def _decide(self, votes: list[dict[str, Any]]) -> None:
        signals = [vote["signal"] for vote in votes if vote["signal"] is not None]
        if self._islands is not None:
            by_island = self._islands.by_island([vote["signal"] for vote in votes])
            if not all(any(of) for of in by_island):
                self._consider_leaving(by_island[self._islands.rank])
                signals = []
        self._decided = signals[0] if signals else None
        self.hook_reason = next((v["stop"] for v in votes if v["stop"] is not None), None)
        self.save_due |= votes[0]["clock"] or any(vote["save"] for vote in votes)
        self.evaluation_due |= any(vote["evaluate"] for vote in votes)

    def _consider_leaving(self, signals: list[int | None]) -> None:
        """Leave the others if they have not received a signal some votes after this island."""
        if received := [number for number in signals if number is not None]:
            self._signalled_votes += 1
            if self._signalled_votes >= _VOTES_BEFORE_LEAVING:
                self.leaves = shown_signal(received[0])

    def _is_time(self) -> bool:
        if self._save_every is None:
            return False
        first = self._save_every if self._has_saved else _FIRST_SAVE_SECONDS
        return time.monotonic() - self._saved_at >= min(first, self._save_every)

    def _next(self) -> int:
        """Return the number of calls that take about `_BETWEEN_VOTES_SECONDS`.

        It at most doubles each time: the first steps are dispatched to idle devices and seem to
        take no time.
        """
        now = time.monotonic()
        per_call = (now - self._voted_at) / max(self._calls - self._voted_call, 1)
        self._voted_at, self._voted_call = now, self._calls
        wanted = max(1, round(_BETWEEN_VOTES_SECONDS / max(per_call, 1e-6)))
        self._span = min(wanted, 2 * self._span)
        return self._span

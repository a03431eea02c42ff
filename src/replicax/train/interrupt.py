"""SIGINT and SIGTERM as a wish to stop, and what a process may do about it at once."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


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
        self.wanted = False
        self.signal: int | None = None
        """The first that came."""
        self._numbers = [signal.SIGINT, signal.SIGTERM] if terminate else [signal.SIGINT]
        self._at_once = at_once
        self._previous: dict[int, object] = {}
        self._pressed = False
        """Whether SIGINT came."""
        self._held = self._answered = False
        self._answering = threading.Lock()
        self._wake: socket.socket | None = None
        self._previous_wake = -1
        self._watching: threading.Thread | None = None

    def hold(self) -> None:
        """From now on there is something that a signal must not throw away.

        It does not return while `at_once` runs, and runs it where a signal is not yet answered.
        """
        with self._answering:
            if self.signal is not None and self._wake is not None:
                self._answer(self.signal)
            self._held = True

    def let_go(self) -> None:
        """What was held is saved, or not worth it."""
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
            self._watch()
        for taken in self._previous:
            signal.signal(taken, self._note)
        _open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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

    def _watch(self) -> None:
        """Have another thread hear of each signal: what the system calls writes to a socket."""
        ear, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._previous_wake = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        self._watching = threading.Thread(
            target=self._hear, args=[ear], name="replicax-signals", daemon=True
        )
        self._watching.start()

    def _hear(self, ear: socket.socket) -> None:
        with ear:
            while numbers := ear.recv(4096):
                for number in numbers:
                    # Else it is no signal of ours, or that of a context within this one.
                    if signal.getsignal(number) == self._note:
                        self._first(number)
                        with self._answering:
                            self._answer(number)

    def _answer(self, number: int) -> None:
        if self._answered:
            return
        self._answered = True
        if not self._held and self._at_once is not None:
            self._at_once(number)

    def _first(self, number: int) -> None:
        if self.signal is None:
            self.signal = number
        self.wanted = True

    def _note(self, number: int, _frame: FrameType | None) -> None:
        # Without the lock: this thread may be interrupted while it has it.
        again = number == signal.SIGINT and self._pressed
        self._pressed = self._pressed or number == signal.SIGINT
        for each in _open[: _open.index(self)] if self in _open else []:
            each._first(number)
            each._answered = True
        self._first(number)
        if again:
            raise KeyboardInterrupt


_open: list[Interrupt] = []
"""From the outermost to the innermost."""


def signal_name(number: int) -> str:
    """What people call a signal: `Ctrl-C`, `SIGTERM`."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _after_fork() -> None:
    """In a child: a SIGTERM that is meant for it ends it, and is not told to its parent."""
    while _open:
        _open.pop()._restore()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_after_fork)

"""Ctrl-C as a wish to stop after the step at hand."""

import signal
import threading
from types import FrameType, TracebackType


class Interrupt:
    """Within this context the first Ctrl-C sets `wanted`, and the second interrupts at once.

    Outside the main thread, where Python hands out no signals, and where SIGINT is ignored, it does
    nothing.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._previous: object = None

    def __enter__(self) -> "Interrupt":
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a job in the background
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)  # type: ignore[arg-type]

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True

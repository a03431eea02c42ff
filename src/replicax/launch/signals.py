"""The signals that the launcher gets, as something to wait for beside all else."""

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType

PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Within this context the signals in `PASSED` are collected, and nothing else comes of them.

    What is ignored stays so, as SIGHUP under `nohup`. Outside the main thread, where Python hands
    out no signals, none are collected.
    """

    def __init__(self) -> None:
        self.descriptor, self._wake = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._wake, False)
        self._received: list[int] = []
        self._previous: dict[int, object] = {}

    def wake(self) -> None:
        """Make `descriptor` readable; from any thread."""
        with contextlib.suppress(OSError):  # full: it is readable; closed: nobody waits
            os.write(self._wake, b".")

    def take(self) -> list[int]:
        """The signals that came since the last call; `descriptor` is not readable after it."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.descriptor, 4096):
                pass
        taken, self._received = self._received, []
        return taken

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in PASSED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self.descriptor)
        wake, self._wake = self._wake, -1  # a late thread writes to nothing, not to another file
        os.close(wake)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)
        self.wake()

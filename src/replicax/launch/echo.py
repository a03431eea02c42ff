"""Output of the processes: shown as lines prefixed with the rank, and written raw to files.

Chatter of C++ libraries is in the files only.
"""

import contextlib
import os
import re
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from replicax.text.table import fold_lines, for_stream, width

MOST_QUEUED_BYTES = 4 << 20
MOST_LINE_BYTES = 1 << 20
PROGRESS_SECONDS = 1.0
HURRY_SECONDS = 0.5
TAIL_LINES = 200
_COLORS = (36, 33, 35, 32, 34, 31)
_CHATTER = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to"
    rb"|WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|I\d{4} [\d:.]+ +\d+ [\w./-]+:\d+\] "
)
"""Lines of C++ libraries about themselves where nothing is wrong; only the logs have them."""


class Echo:
    """The launcher's output, queued so that a slow reader does not block it.

    `labels` name the processes in the prefixes of their lines, instead of their ranks.
    """

    def __init__(self, processes: int, quiet: bool, labels: Sequence[str] = ()) -> None:
        self.closed = False
        """Whether its reader has closed it."""
        self._until = float("inf")
        digits = len(str(processes - 1))
        self._labels = labels or [f"{rank:{digits}}" for rank in range(processes)]
        self._quiet = quiet
        self._queue: deque[tuple[int, memoryview]] = deque()
        self._bytes = 0

    @property
    def prefix_width(self) -> int:
        """Columns before the lines of a process."""
        return max(map(len, self._labels)) + len("[] ")

    @property
    def full(self) -> bool:
        """Whether the queue is so long that no more should be read."""
        return self._bytes > MOST_QUEUED_BYTES and self.waiting_for is not None

    @property
    def waiting_for(self) -> int | None:
        """The descriptor of the next data in the queue; None if there is none."""
        over = self.closed or time.monotonic() >= self._until
        return None if over or not self._queue else self._queue[0][0]

    def say(self, line: str, *, error: bool = False) -> None:
        """Show a line from the launcher itself."""
        stream = sys.stderr if error else sys.stdout
        text = for_stream(line, stream) if _is_terminal(stream) else line
        self._put(stream, f"{text}\n".encode(errors="replace"))

    def lines(self, process: int, lines: list[bytes], *, error: bool) -> None:
        """Show lines of a process, given without line breaks."""
        stream = sys.stderr if error else sys.stdout
        prefix = f"[{self._labels[process]}] ".encode()
        if _is_terminal(stream):
            room = width() - len(prefix)
            lines = [part for line in lines for part in _folded(line, room)]
        if _colored(stream):
            color = _COLORS[process % len(_COLORS)]
            prefix = f"\x1b[{color}m".encode() + prefix.rstrip() + b"\x1b[0m "
        self._put(stream, b"".join(prefix + line + b"\n" for line in lines))

    def write(self) -> None:
        """Write the next queued data without blocking; its descriptor must be ready."""
        number, data = self._queue.popleft()
        try:  # no more than a ready pipe accepts at once
            written = os.write(number, data[: select.PIPE_BUF])
        except OSError:
            self.closed = True
            with contextlib.suppress(OSError):  # otherwise Python prints an error at exit
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)
            return
        self._bytes -= written
        if written < len(data):
            self._queue.appendleft((number, data[written:]))

    def hurry(self) -> None:
        """Stop waiting for a slow reader after a moment; the logs have everything."""
        self._until = time.monotonic() + HURRY_SECONDS

    def close(self, interrupted: Callable[[], bool]) -> None:
        """Return once all is written, cannot be, or a moment after `interrupted` returns true."""
        while (number := self.waiting_for) is not None:
            if interrupted():
                self.hurry()
            waiting = select.poll()
            waiting.register(number, select.POLLOUT)
            if waiting.poll(100):  # not forever: `interrupted` is asked again
                self.write()

    def _put(self, stream: TextIO | None, data: bytes) -> None:
        if stream is None or self._quiet or self.closed or time.monotonic() >= self._until:
            return  # None if Python was started without it
        try:
            try:
                stream.flush()  # what was printed before comes first
                self._queue.append((stream.fileno(), memoryview(data)))
                self._bytes += len(data)
            except (AttributeError, OSError, ValueError):  # a notebook's, a test's
                stream.write(data.decode(errors="backslashreplace"))
                stream.flush()
        except (OSError, ValueError):
            self.closed = True


def _folded(line: bytes, columns: int) -> list[bytes]:
    if len(line) <= columns:
        return [line]
    return fold_lines(line.decode(errors="replace"), columns).encode().split(b"\n")


def _colored(stream: TextIO | None) -> bool:
    return _is_terminal(stream) and not os.environ.get("NO_COLOR")


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


class Log:
    """The log file of one process, with both of its streams."""

    def __init__(self, path: Path, echo: Echo) -> None:
        self._path, self._echo = path, echo
        self._file = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Append `data`; a full disk ends the log but not the job."""
        try:
            if not self._file.closed:
                self._file.write(data)
        except OSError as error:
            ends = f"{self._path}: {error.strerror}; this log ends here, the job continues"
            self._echo.say(f"replicax: {ends}", error=True)
            self.close()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()


class Output:
    """One stream of one process; passes what is read to the echo, as lines, and to the log.

    A progress bar (which redraws its line after a carriage return) is shown once a second; the log
    has all of it.
    """

    def __init__(self, process: int, echo: Echo, log: Log, *, error: bool) -> None:
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._process, self._echo, self._log, self._error = process, echo, log, error
        self._rest = self._unlogged = b""
        self._shown = time.monotonic()

    def feed(self, data: bytes) -> None:
        """Process data read from the stream."""
        self._write_log(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        # The last state of a progress bar that is whole: what follows it may be half a line.
        drawing = self._rest.rpartition(b"\r")[0].rpartition(b"\r")[2]
        if len(self._rest) > MOST_LINE_BYTES:
            if not drawing:  # a line without an end; bars that were redrawn are dropped
                lines.append(self._rest)
            self._rest = b""
        if lines:
            self._show([_last_drawn(line) for line in lines])
        elif drawing and time.monotonic() - self._shown > PROGRESS_SECONDS:
            self._show([drawing])

    def end(self) -> None:
        """Show the last, unterminated line."""
        if self._rest:
            self._show([_last_drawn(self._rest)])
            self._log.write(self._unlogged)
        self._rest = self._unlogged = b""

    def _show(self, lines: list[bytes]) -> None:
        self._shown = time.monotonic()
        self.tail.extend(line[:4096].decode(errors="replace") for line in lines[-TAIL_LINES:])
        told = [line for line in lines if not _CHATTER.match(line)]
        self._echo.lines(self._process, told, error=self._error)

    def _write_log(self, data: bytes) -> None:
        """Log up to the last line break, so that lines of the two streams do not mix."""
        self._unlogged += data
        size = max(self._unlogged.rfind(b"\n"), self._unlogged.rfind(b"\r")) + 1
        if len(self._unlogged) - size > MOST_LINE_BYTES:
            size = len(self._unlogged)
        if size:
            self._log.write(self._unlogged[:size])
            self._unlogged = self._unlogged[size:]


def _last_drawn(line: bytes) -> bytes:
    """Return the visible part of a line that was redrawn."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]

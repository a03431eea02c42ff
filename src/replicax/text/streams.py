"""Output of a run: nothing that happens to it ends the run."""

import contextlib
import datetime
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from replicax.text.table import for_stream


class Unfailing:
    """A text stream whose errors are no errors: a full disk, a reader that is gone, no stream.

    Characters that `target` cannot encode become question marks. Text that it could not take may
    be written later, with the next.
    """

    def __init__(self, target: Any, tells: bool = True) -> None:
        self._target, self._tells = io.StringIO() if target is None else target, tells

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def write(self, text: str) -> int:
        encoding = getattr(self._target, "encoding", None) or "utf-8"
        with self._trying():
            self._target.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        with self._trying():
            self._target.flush()

    def isatty(self) -> bool:
        with contextlib.suppress(Exception):  # it is closed, or an object of the user's
            return bool(self._target.isatty())
        return False

    def discard(self) -> None:
        """Drop what the target still cannot take, so that the interpreter need not fail over it."""
        try:
            self._target.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._target.fileno())

    @contextlib.contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of the system, or of an object of the user's
            if self._tells:
                self._tells = False
                alarm(
                    f"standard output: {getattr(error, 'strerror', '') or error}; the run goes on"
                )


class JsonLines(io.TextIOBase):
    """A text stream that writes each line as a JSON object, and records as their fields."""

    def __init__(self, target: Any, **fields: Any) -> None:
        self._target, self._fields, self._part = target, fields, ""

    def write(self, text: str) -> int:
        *lines, self._part = f"{self._part}{text}".split("\n")
        for line in filter(str.strip, lines):
            self.put(line=line)
        return len(text)

    def put(self, **values: Any) -> None:
        """Write an object with the time and these values."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        print(json.dumps({"time": now, **self._fields, **values}), file=self._target, flush=True)


@contextlib.contextmanager
def json_lines() -> Iterator[None]:
    """Let all that Python prints in this context be JSON, also an error that ends it."""
    told = JsonLines(sys.stderr, stream="stderr")
    with contextlib.redirect_stdout(JsonLines(sys.stdout)), contextlib.redirect_stderr(told):
        try:
            yield
        except BaseException as error:
            told.put(error=type(error).__name__, line=str(error))
            raise


def alarm(line: str, who: str = "") -> None:
    """Print a line that must not be missed to stderr; `who` is the process, if of several."""
    stream = Unfailing(sys.stderr, tells=False)
    print(for_stream(f"{who}ALARM  {line}", stream), file=stream, flush=True)


@contextlib.contextmanager
def unfailing_stdout() -> Iterator[None]:
    """Let no error of stdout end what is done in this context."""
    stream = Unfailing(sys.stdout)
    with contextlib.redirect_stdout(stream):
        try:
            yield
        finally:
            stream.discard()

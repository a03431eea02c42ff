"""The lines of a run's `goodput.jsonl`; see `replicax.train.goodput`."""

import contextlib
import dataclasses
import io
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from replicax.train.lines import Lines
from replicax.train.places import is_remote, read_bytes

FILE = "goodput.jsonl"

BUCKETS = (
    *("productive", "compiling", "lost", "saving", "restoring", "waiting", "hooks", "starting"),
)
"""Where time goes: to steps and evaluations that count, to compiling, to what was thrown away, to
what saving keeps the loop from, to reading and verifying a checkpoint, to waiting for input, to
hooks, and to all that comes before."""

Seconds = dict[str, float]
"""Bucket -> seconds."""

_LONGEST_LINE_BYTES = 4096
_MOST_SECONDS = 1e10
"""Three centuries: what is longer, or later than that after 1970, is no time of ours."""


def nothing_spent() -> Seconds:
    """Each bucket, empty."""
    return dict.fromkeys(BUCKETS, 0.0)


@dataclasses.dataclass(frozen=True)
class Line:
    """How far a start has come."""

    start: int
    """Its token."""
    known: bool
    """Whether it knows by now what it goes on from."""
    restored: int | None
    """The step it goes on from; None where it began anew."""
    step: int | None
    """Of its last mark, or the one it goes on from."""
    mark: bool
    """Whether this is a mark."""
    at: float
    """Seconds since 1970."""
    seconds: Seconds
    """Since it began."""
    hooks: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Name -> seconds of each hook that took any."""

    def to_json(self) -> str:
        """One line."""
        fields: dict[str, Any] = {"start": self.start}
        if self.known:
            fields["restored"] = self.restored
        fields |= {"step": self.step, "mark": self.mark, "at": self.at, "seconds": self.seconds}
        fields |= {"hooks": dict(self.hooks)} if self.hooks else {}
        return json.dumps(fields)


def read_lines(path: Path, below: int) -> tuple[Iterator[Line], str | None]:
    """The lines in `path` of starts with a token under `below`, and why there may be more."""
    try:
        remote = io.BytesIO(read_bytes(path)) if is_remote(path) else None
        with remote or open(path, "rb", opener=_open_here) as file:
            lines = [line for text in _texts(file) if (line := _line(text)) and line.start < below]
    except FileNotFoundError:
        return iter(()), None
    except OSError as error:
        return iter(()), _cause(path, error)
    return iter(lines), None


class Appender:
    """Adds lines to `path`, each whole or not at all for who reads it.

    In an object store they are there from the next mark on, and once it is closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._remote = Lines(path) if is_remote(path) else None
        self._descriptor: int | None = None
        self._torn = False

    def append(self, line: Line) -> str | None:
        """Write `line`; returns why it could not, or None."""
        try:
            if self._remote is not None:
                self._remote.append(line.to_json())
                if line.mark:
                    self._remote.sync()
                return None
            if self._descriptor is None:
                self._open()
            assert self._descriptor is not None
            text = f"{line.to_json()}\n".encode()
            if self._torn:  # what a kill, or a full disk, left of the line before
                text = b"\n" + text
            self._torn = os.write(self._descriptor, text) < len(text)
        except OSError as error:
            return _cause(self._path, error)
        return f"{self._path} was not written whole: the disk is full" if self._torn else None

    def close(self) -> None:
        """Close the file."""
        if self._remote is not None:
            with contextlib.suppress(OSError):
                self._remote.sync()
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # each line was written when it was added
                os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        descriptor = _open_here(str(self._path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            os.lseek(descriptor, max(0, size - 1), os.SEEK_SET)
            self._torn = size > 0 and os.read(descriptor, 1) != b"\n"
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor


def _open_here(path: str, flags: int) -> int:
    """Not through a link out of the folder, and not waiting for the other end of a pipe."""
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"):
        flags |= getattr(os, name, 0)  # Windows has none of them
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file")
    return descriptor


def _cause(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or type(error).__name__}"


def _texts(file: Any) -> Iterator[bytes]:
    """The lines of `file`, without those that are too long to be ours."""
    whole = True
    while text := file.readline(_LONGEST_LINE_BYTES):
        ends = text.endswith(b"\n")
        if whole and ends:
            yield text
        whole = ends


def _line(text: bytes) -> Line | None:
    """The line that `text` is, or None."""
    try:
        fields = json.loads(text)
        told = {"hooks": 0.0, **fields["seconds"]}  # older lines have no hooks
        seconds = {bucket: _time(told[bucket]) for bucket in BUCKETS}
        return Line(
            start=_count(fields["start"]),
            known="restored" in fields,
            restored=_step(fields.get("restored")),
            step=_step(fields["step"]),
            mark=fields["mark"] is True,
            at=_time(fields["at"]),
            seconds=seconds,
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _step(value: Any) -> int | None:
    return None if value is None else _count(value)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= _MOST_SECONDS:  # nor NaN
        raise ValueError
    return float(value)

"""Where a run's wall time went, over all its starts.

    goodput.jsonl   {"start": 2, "restored": 120, "step": 140, "mark": true, "at": 1795338000.5,
                     "seconds": {"productive": 61.5, "saving": 0.4, ...}}

A line says how far a start has come: the seconds of each bucket since it began, and the step of its
last mark. A start's last line counts. What it did is lost where a later start goes on from before:
a start that restores the checkpoint of step S throws away all that was done after the last mark of
S, be it in one earlier start or in several, but for the seconds of `saving` and `restoring`. A
start that restores nothing throws away all. Lines that are broken are skipped.

Time between a start's last line and the next start is no wall time of the run: it is `down`.
"""

import contextlib
import dataclasses
import json
import math
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from replicax.train.places import Lines, read_bytes
from replicax.wording import duration

FILE = "goodput.jsonl"
BUCKETS = "productive", "compiling", "lost", "saving", "restoring", "waiting", "hooks", "starting"
"""Where time goes: to steps and evaluations that count, to compiling, to what was thrown away, to
what saving keeps the loop from, to reading and verifying a checkpoint, to waiting for input, to
hooks, and to all that comes before."""
_STAYS = ("saving", "restoring", "lost")
"""Buckets whose seconds stay where they are when what was done is thrown away."""
_SECONDS_BETWEEN_BEATS = 5.0
_SHARE_BETWEEN_BEATS = 1e-3
"""Share of a start's time: a month of it leaves some thousand lines, and not half a million."""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Where the time went."""

    seconds: dict[str, float]
    """By bucket, see `BUCKETS`."""
    starts: int
    """Starts of the run, this one included."""
    down_seconds: float
    """Between its starts, as far as is known; no wall time of the run."""
    hooks: dict[str, float] = dataclasses.field(default_factory=dict)
    """Name -> seconds of each hook, in this start."""

    @property
    def wall_seconds(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def productive_fraction(self) -> float:
        wall = self.wall_seconds
        return self.seconds["productive"] / wall if wall > 0 else 0.0

    def lines(self) -> list[str]:
        """For the closing summary, in 80 columns; buckets under 0.05% are left out."""
        wall, blank = self.wall_seconds, "\N{NO-BREAK SPACE}"
        most = f" (most {max(self.hooks, key=self.hooks.__getitem__)})" if self.hooks else ""
        parts = [
            f"{bucket} {self.seconds[bucket] / wall:.1%}{most if bucket == 'hooks' else ''}"
            for bucket in BUCKETS
            if self.seconds[bucket] >= 5e-4 * wall > 0
        ]
        if self.down_seconds > 0:
            parts.append(f"and {duration(self.down_seconds)} between the starts")
        starts = f" over {self.starts:,} starts" if self.starts > 1 else ""
        said = f" ·{blank}".join(part.replace(" ", blank) for part in parts)
        text = f"time   {duration(wall)}{starts}{':' if parts else ''} {said}"
        lines = textwrap.wrap(text, 80, subsequent_indent=" " * 7, break_on_hyphens=False)
        return [line.replace(blank, " ") for line in lines]


class Ledger:
    """Counts the time of one start: there is always one bucket that it goes to.

    So the buckets add up to the wall time since the ledger was made, whatever happens. It begins in
    `starting`. A file that cannot be written stops nothing: `fault` says why, and the next line is
    tried again. Without a file, as in processes other than 0, it counts in memory only.

    Args:
        path: `goodput.jsonl`, or None.
        token: of this start; lines with this one or a larger one are of no earlier start.
        clock: seconds that pass.
        now: seconds since 1970, to tell how long the run was down.
    """

    def __init__(
        self,
        path: Path | None,
        token: int = 1,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._lines = None if path is None else Lines(path)
        self._clock, self._now = clock, now
        self._seconds, self._bucket = dict.fromkeys(BUCKETS, 0.0), "starting"
        self._made = self._since = self._written_at = clock()
        self._began = now()
        self._told: dict[str, Any] = {"start": token, "step": None}
        self._earlier: list[_Start] = []
        self._before_line = ""
        self.fault: str | None = None
        self.hooks: Mapping[str, float] = {}
        """Name -> seconds that the loop has spent in each hook, kept by who calls them."""
        if path is not None:
            with contextlib.suppress(OSError):  # writing tells
                text = read_bytes(path)
                self._earlier = _starts(text, token)
                self._before_line = "\n" if text and not text.endswith(b"\n") else ""
        self._write(mark=False)

    def enter(self, bucket: str) -> None:
        at = self._clock()
        self._seconds[self._bucket] += at - self._since
        self._bucket, self._since = bucket, at

    @contextlib.contextmanager
    def spending(self, bucket: str) -> Iterator[None]:
        before = self._bucket
        self.enter(bucket)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` for `target` that went to `source`, as far as it has as many."""
        self.enter(self._bucket)  # what has passed up to here
        moved = max(0.0, min(seconds, self._seconds[source]))
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def restored(self, step: int | None) -> None:
        """This start goes on from the checkpoint of `step`; None: it begins anew, from nothing.

        What earlier starts did after it is lost. Until this is called nothing is.
        """
        self._told |= {"restored": step, "step": step}
        for start in self._earlier:
            start.cut(step)
        self._write(mark=False)

    def mark(self, step: int) -> None:
        """A checkpoint of `step` is being taken: who restores it loses nothing up to here."""
        self._told["step"] = step
        self._write(mark=True)

    def beat(self) -> None:
        """Write a line where the last is older than 5 s, or than a thousandth of this start's time.

        A killed start's time is known to within that.
        """
        at = self._clock()
        longest = max(_SECONDS_BETWEEN_BEATS, (at - self._made) * _SHARE_BETWEEN_BEATS)
        if at - self._written_at > longest:
            self._write(mark=False)

    def close(self, *, kept: bool = False) -> None:
        """Write a last line; a second time, nothing.

        Args:
            kept: whether what was done since the last mark, or since the restore, lasts although
                no checkpoint has it: true of what follows a last checkpoint (drawing, say), false
                of a start that failed, which is done again from there.
        """
        self._write(mark=kept and self._told["step"] is not None, last=True)
        self._lines = None

    def summary(self) -> Goodput:
        every = [*(start.seconds for start in self._earlier), self._spent()]
        seconds = {bucket: math.fsum(each[bucket] for each in every) for bucket in BUCKETS}
        ends = [start.ended for start in self._earlier]
        begins = [*(start.began for start in self._earlier), self._began][1:]
        down = math.fsum(max(0.0, begin - end) for end, begin in zip(ends, begins, strict=True))
        return Goodput(seconds, len(every), down, dict(self.hooks))

    def _spent(self) -> dict[str, float]:
        self.enter(self._bucket)
        seconds = dict(self._seconds)
        taken = min(math.fsum(self.hooks.values()), seconds["productive"])
        seconds["productive"] -= taken
        seconds["hooks"] += taken
        return seconds

    def _write(self, *, mark: bool, last: bool = False) -> None:
        self._written_at = self._clock()
        if self._lines is None:
            return
        line = {**self._told, "mark": mark, "at": self._now(), "seconds": self._spent()}
        try:
            self._lines.append(f"{self._before_line}{json.dumps(line)}")
            if mark or last:
                self._lines.sync()
            self._before_line, self.fault = "", None
        except OSError as error:
            self._before_line = "\n"  # after what a full disk has left of it
            self.fault = f"{self._lines.path}: {error.strerror}"


class _Start:
    """An earlier start, and what later ones have left of its time."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        first, self.last = lines[0], lines[-1]
        self.began = first["at"] - math.fsum(first["seconds"].values())
        self.ended, self.seconds = self.last["at"], self.last["seconds"]
        self._marks = [line for line in lines if line["mark"]]

    def cut(self, step: int | None) -> None:
        """Throw away what was done after the last mark up to `step`, or all where there is none."""
        while self._marks and (step is None or self._marks[-1]["step"] > step):
            self._marks.pop()
        base = self._marks[-1]["seconds"] if self._marks else dict.fromkeys(BUCKETS, 0.0)
        goes = {bucket: base[bucket] for bucket in BUCKETS if bucket not in _STAYS}
        lost = math.fsum(self.seconds[bucket] - seconds for bucket, seconds in goes.items())
        if lost > 0:  # it can be less, where seconds were moved after the mark
            self.seconds = {**self.seconds, **goes, "lost": self.seconds["lost"] + lost}


def _starts(text: bytes, below: int) -> list[_Start]:
    """The starts with a token under `below`, each with what the later ones have left of it."""
    of: dict[int, list[dict[str, Any]]] = {}
    for line in map(_line, text.splitlines()):
        if line is not None and max(of, default=0) <= line["start"] < below:  # else was replaced
            of.setdefault(line["start"], []).append(line)
    starts = [_Start(lines) for lines in of.values()]
    for number, start in enumerate(starts):
        for earlier in starts[:number] if "restored" in start.last else ():
            earlier.cut(start.last["restored"])
    return starts


def _line(text: bytes) -> dict[str, Any] | None:
    """The line that `text` is; None where a kill, or a full disk, has left a part of one."""
    try:
        line: dict[str, Any] = json.loads(text)
        return {**line, "seconds": dict.fromkeys(BUCKETS, 0.0) | line["seconds"]}
    except (ValueError, TypeError, KeyError):
        return None

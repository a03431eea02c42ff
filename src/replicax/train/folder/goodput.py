"""How the wall time of a run was spent, over all its starts.

    goodput.jsonl   {"start": 2, "restored": 120, "step": 140, "mark": true, "at": 1795338000.5,
                     "seconds": {"productive": 61.5, "saving": 0.4, ...}, "of_clock": 0.834,
                     "crc": 2596996162}

A start is the first launch of the run or a restart. Each line is a snapshot of one: the seconds in
each bucket since it began, and the step of its last mark. The last line of a start counts. Work is
lost if a later start resumes from before it: a start that restores the checkpoint of step S
discards everything after the last mark of S, in one earlier start or several, except the seconds of
`saving` and `restoring`. A start that restores nothing discards all. A damaged line, one that does
not match its checksum `crc`, is left out.

The time from the last line of a start to the next start is `down` time, not wall time of the run.
`of_clock` is the productive share of both, over all starts so far; it is for readers of the file.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from replicax.text.table import NO_BREAK, labelled
from replicax.text.wording import duration
from replicax.train.files.places import Lines, read_bytes

FILE = "goodput.jsonl"
BUCKETS = (
    *("productive", "evaluating", "compiling", "lost", "saving", "restoring", "waiting"),
    *("islands", "hooks", "starting"),
)
"""Categories of time: steps that count, evaluations that do, compilation, discarded work, saving
that blocks the loop, reading and verifying a checkpoint, waiting for input, steps that took longer
because an island was lost or joined, the user's hooks, and startup (all time before compilation).
"""
TO_CHANGE = {
    "evaluating": "Evaluation(every_epochs=, max_rows=)",
    "saving": "Saving(every=, minutes=)",
    "waiting": "prefetch=, workers of the loader",
}
"""Settings that change a bucket, named from a share of `_MUCH`."""
_MUCH = 0.1
_STAYS = ("saving", "restoring", "lost")
"""Buckets that keep their seconds when work is discarded."""
_SECONDS_BETWEEN_BEATS = 5.0
_SHARE_BETWEEN_BEATS = 1e-3
"""Fraction of a start's time: one month gives some thousand lines instead of half a million."""


@dataclasses.dataclass(frozen=True)
class Goodput:
    """How the time was spent."""

    seconds: dict[str, float]
    """Seconds by bucket; see `BUCKETS`."""
    starts: int
    """Number of starts of the run that did a step, including this one in any case."""
    down_seconds: float
    """Time between starts, as far as known; not part of the wall time."""
    hooks: dict[str, float] = dataclasses.field(default_factory=dict)
    """Name -> seconds of each hook that was passed to the run, in this start."""

    @property
    def wall_seconds(self) -> float:
        return math.fsum(self.seconds.values())

    @property
    def productive_fraction(self) -> float:
        wall = self.wall_seconds
        return self._good_seconds / wall if wall > 0 else 0.0

    @property
    def clock_fraction(self) -> float:
        """Productive share of the whole time since the first start, `down_seconds` included."""
        clock = self.wall_seconds + self.down_seconds
        return self._good_seconds / clock if clock > 0 else 0.0

    @property
    def _good_seconds(self) -> float:
        return self.seconds["productive"] + self.seconds["evaluating"]

    def lines(self) -> list[str]:
        """Lines for the closing summary, in 80 columns; buckets under 0.05% are omitted."""
        wall = self.wall_seconds
        shares = {bucket: self.seconds[bucket] / wall if wall > 0 else 0.0 for bucket in BUCKETS}
        named = {name: text for name, text in TO_CHANGE.items() if shares[name] >= _MUCH}
        if self.hooks:
            named["hooks"] = f"most {max(self.hooks, key=self.hooks.__getitem__)}"
        parts = [
            f"{bucket} {share:.1%}{f' ({named[bucket]})' if bucket in named else ''}"
            for bucket, share in shares.items()
            if share >= 5e-4
        ]
        down = []
        if self.down_seconds > 0:
            down = labelled(
                "",
                f"not running for {duration(self.down_seconds)} between starts: productive "
                f"{self.clock_fraction:.1%} in all",
            )
        starts = f" over {self.starts:,} starts" if self.starts > 1 else ""
        said = f" ·{NO_BREAK}".join(part.replace(" ", NO_BREAK) for part in parts)
        return [*labelled("time", f"{duration(wall)}{starts}{':' if parts else ''} {said}"), *down]


class Ledger:
    """Tracks the time of one start, assigning it to one bucket at a time.

    The buckets therefore always add up to the wall time since the ledger was made. The first bucket
    is `starting`. A write error does not stop the run: the next write tries again. Without a file,
    as in processes other than 0, it counts in memory only.

    Args:
        path: `goodput.jsonl`, or None.
        token: number of this start; lines with this token or a larger one are ignored.
        clock: a monotonic clock, in seconds.
        now: seconds since 1970, to measure how long the run was down.
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
        self.saved: list[int] = []
        """Steps that earlier starts began to save, unless a later one gave them up; sorted."""
        self.damaged = 0
        """Number of lines of earlier starts that cannot be read."""
        self.hooks: Mapping[str, float] = {}
        """Hook name -> seconds that the loop has spent in it, updated by the caller of hooks."""
        if self._lines is not None:
            with contextlib.suppress(OSError):  # writing reports the error
                text = self._lines.contents()
                self._earlier, self.damaged = _starts(text, token)
                steps = {step for start in self._earlier for step, _ in start.marks}
                self.saved = sorted(steps)
                if text and not text.endswith(b"\n"):  # cut off by a kill
                    self._lines.append("")
        self._write(mark=False)

    @property
    def fault(self) -> str | None:
        """Why lines are not written yet, unless that was returned before."""
        return None if self._lines is None else self._lines.fault

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
        """Move `seconds` from bucket `source` to `target`, at most as many as `source` has."""
        if seconds <= 0:
            return
        self.enter(self._bucket)  # the time up to now
        moved = min(seconds, self._seconds[source])
        self._seconds[source] -= moved
        self._seconds[target] += moved

    def restored(self, step: int | None) -> None:
        """Note that this start resumes from the checkpoint of `step`, or from scratch if None.

        The work of earlier starts after it is lost; until this is called, none is.
        """
        self._told |= {"restored": step, "step": step}
        for start in self._earlier:
            start.cut(step)
        self._write(mark=False)

    def mark(self, step: int) -> None:
        """Note that a checkpoint of `step` is being saved: restoring it loses nothing before."""
        self._told["step"] = step
        self._write(mark=True)

    def beat(self) -> None:
        """Write a line if the last is older than 5 s and 0.1% of the time since this start.

        The time of a killed start is known to that precision.
        """
        at = self._clock()
        longest = max(_SECONDS_BETWEEN_BEATS, (at - self._made) * _SHARE_BETWEEN_BEATS)
        if at - self._written_at > longest:
            self._write(mark=False)

    def close(self, *, kept: bool = False) -> None:
        """Write a last line; a second call writes nothing.

        Args:
            kept: whether the time since the last mark, or since the restore, counts although no
                checkpoint has it: true after the final checkpoint (for example while drawing),
                false for a start that failed, as its work is repeated.
        """
        self._write(mark=kept and self._told["step"] is not None, last=True)
        self._lines = None

    def summary(self) -> Goodput:
        now = _Start(self._began, self._began, self._spent(), stepped=True)
        return dataclasses.replace(_over([*self._earlier, now]), hooks=dict(self.hooks))

    def _spent(self) -> dict[str, float]:
        self.enter(self._bucket)
        seconds = dict(self._seconds)
        in_hooks = min(math.fsum(self.hooks.values()), seconds["productive"])
        seconds["productive"] -= in_hooks
        seconds["hooks"] += in_hooks
        return seconds

    def _write(self, *, mark: bool, last: bool = False) -> None:
        self._written_at = self._clock()
        if self._lines is None:
            return
        line = {**self._told, "mark": mark, "at": self._now(), "seconds": self._spent()}
        line["of_clock"] = round(self.summary().clock_fraction, 6)
        text = json.dumps(line)
        self._lines.append(f'{text[:-1]}, "crc": {zlib.crc32(text.encode())}}}')
        if mark or last:
            self._lines.sync()


def read_goodput(path: Path) -> Goodput | None:
    """Return how the time was spent by the `goodput.jsonl` at `path`; None if it does not tell."""
    starts: list[_Start] = []
    with contextlib.suppress(OSError):
        starts, _ = _starts(read_bytes(path), None)
    return _over(starts) if starts else None


_Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


_CRC = re.compile(rb', "crc": (\d+)\}$')


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    start: int
    mark: bool
    at: _Seconds
    seconds: dict[str, _Seconds]
    step: int | None = None
    restored: int | msgspec.UnsetType | None = msgspec.UNSET
    of_clock: float | None = None


@dataclasses.dataclass
class _Start:
    """A start, and the part of its time that later starts kept."""

    began: float
    ended: float
    seconds: dict[str, float]
    stepped: bool
    """Whether it did a step."""
    marks: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)
    """Step and seconds of each mark."""

    def cut(self, step: int | None) -> None:
        """Discard the work after the last mark at or before `step`; all of it without a mark."""
        while self.marks and (step is None or self.marks[-1][0] > step):
            self.marks.pop()
        base = self.marks[-1][1] if self.marks else dict.fromkeys(BUCKETS, 0.0)
        goes = {bucket: base[bucket] for bucket in BUCKETS if bucket not in _STAYS}
        lost = math.fsum(self.seconds[bucket] - seconds for bucket, seconds in goes.items())
        if lost > 0:  # it can be negative if seconds were moved after the mark
            self.seconds = {**self.seconds, **goes, "lost": self.seconds["lost"] + lost}


def _over(starts: Sequence[_Start]) -> Goodput:
    seconds = {bucket: math.fsum(each.seconds[bucket] for each in starts) for bucket in BUCKETS}
    down = math.fsum(max(0.0, b.began - a.ended) for a, b in itertools.pairwise(starts))
    return Goodput(seconds, sum(start.stepped for start in starts), down)


def _starts(text: bytes, below: int | None) -> tuple[list[_Start], int]:
    """The starts with a token below `below`, each without the time that later ones discarded.

    The second result is the number of lines that cannot be read.
    """
    by_start: dict[int, list[_Line]] = {}
    read = [_line(each) for each in text.splitlines() if each]
    for line in read:
        if line is None or (below is not None and line.start >= below):
            continue
        if line.start >= max(by_start, default=0):  # else superseded
            by_start.setdefault(line.start, []).append(line)
    starts: list[_Start] = []
    for lines in by_start.values():
        first, last = lines[0], lines[-1]
        marks = [(line.step, line.seconds) for line in lines if line.mark and line.step is not None]
        began = first.at - math.fsum(first.seconds.values())
        if not isinstance(last.restored, msgspec.UnsetType):
            for earlier in starts:
                earlier.cut(last.restored)
        stepped = last.seconds["productive"] > 0
        starts.append(_Start(began, last.at, last.seconds, stepped, marks))
    return starts, read.count(None)


def _line(text: bytes) -> _Line | None:
    """Parse a line; None if it is damaged, for example cut off by a kill."""
    if match := _CRC.search(text):
        text = text[: match.start()] + b"}"
        if zlib.crc32(text) != int(match[1]):
            return None
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    line.seconds = {bucket: line.seconds.get(bucket, 0.0) for bucket in BUCKETS}
    return line

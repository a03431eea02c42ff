"""Where a run's wall time went, over all its starts.

    goodput.jsonl   {"start": 2, "restored": 120, "step": 140, "mark": true, "at": 1795338000.5,
                     "seconds": {"productive": 61.5, "saving": 0.4, ...}}

A line says how far a start has come: the seconds of each bucket since it began, and the step of its
last mark. A start's last line counts. What it did is lost where a later start goes on from before:
a start that restores the checkpoint of step S throws away all that was done after the last mark of
S, be it in one earlier start or in several, but for the seconds of `saving` and `restoring`. A
start that restores nothing throws away all. Lines that are broken, or none of ours, are skipped.

Time between a start's last line and the next start is no wall time of the run: it is `down`.
"""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from replicax.train.goodput_file import (
    BUCKETS,
    Appender,
    Line,
    Seconds,
    nothing_spent,
    read_lines,
)
from replicax.wording import duration

_STAYS = ("saving", "restoring", "lost")
"""Buckets whose seconds stay where they are when what was done is thrown away."""

_SECONDS_BETWEEN_BEATS = 5.0
_SHARE_BETWEEN_BEATS = 1e-3
"""Of a start's time: a month of it leaves some thousand lines, and not half a million."""

_COLUMNS = 80
_MARGIN = 7


@dataclasses.dataclass(frozen=True)
class Goodput:
    """Where the time went."""

    seconds: Seconds
    """By bucket, see `BUCKETS`."""
    starts: int
    """Of the run, this one included."""
    down_seconds: float
    """Between its starts, as far as is known; no wall time of the run."""
    hooks: dict[str, float] = dataclasses.field(default_factory=dict)
    """Name -> seconds of each hook, in this start."""

    @property
    def wall_seconds(self) -> float:
        """Of all starts: the sum of the buckets."""
        return math.fsum(self.seconds.values())

    @property
    def productive_fraction(self) -> float:
        """Share of the wall time; 0 where there is none."""
        wall = self.wall_seconds
        return self.seconds["productive"] / wall if wall > 0 else 0.0

    def lines(self) -> list[str]:
        """For the closing summary, in 80 columns; buckets under 0.05% are left out."""
        wall = self.wall_seconds
        starts = f" over {self.starts:,} starts" if self.starts > 1 else ""
        parts = [
            f"{bucket} {self.seconds[bucket] / wall:.1%}{self._most(bucket)}"
            for bucket in BUCKETS
            if self.seconds[bucket] >= 5e-4 * wall > 0
        ]
        if self.down_seconds > 0:
            parts.append(f"and {duration(self.down_seconds)} between the starts")
        lines = [f"{'time':<{_MARGIN}}{duration(wall)}{starts}" + (":" if parts else "")]
        for number, part in enumerate(parts):
            joined = f"{lines[-1]} {part}" if number == 0 else f"{lines[-1]} · {part}"
            if len(joined) <= _COLUMNS:
                lines[-1] = joined
            else:
                lines.append(f"{' ' * _MARGIN}· {part}")
        return lines

    def _most(self, bucket: str) -> str:
        """The hook that took most of its time, after the bucket of the hooks."""
        if bucket != "hooks" or not self.hooks:
            return ""
        return f" (most {max(self.hooks, key=lambda name: self.hooks[name])})"

    def to_json(self) -> dict[str, Any]:
        """The same as JSON values."""
        return {
            "wall_seconds": self.wall_seconds,
            "productive_fraction": self.productive_fraction,
            "starts": self.starts,
            "down_seconds": self.down_seconds,
            "seconds": dict(self.seconds),
            "hooks": dict(self.hooks),
        }


class Ledger:
    """Counts the time of one start: there is always one bucket that it goes to.

    So the buckets add up to the wall time since the ledger was made, whatever happens. It begins in
    `starting`. A thread may call `beat` beside the one that trains. A file that cannot be written
    stops nothing: `fault` says why, and the next line is tried again.

    Args:
        path: `goodput.jsonl`; None counts in memory only, for processes other than 0 and for runs
            without a folder.
        token: of this start, larger than that of any before. Lines of this token or a larger one
            are not of an earlier start, and are skipped.
        before_seconds: what this start took before the ledger was made, for `starting`.
        clock: seconds that pass.
        now: seconds since 1970, to tell how long the run was down.
    """

    def __init__(
        self,
        path: Path | None,
        token: int = 1,
        *,
        before_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._now, self._token = clock, now, token
        self._counting = threading.Lock()  # held for no I/O: `enter` never waits for a file
        self._writing = threading.Lock()
        self._seconds = nothing_spent()
        self._seconds["starting"] = max(0.0, before_seconds)
        self._made = self._since = self._written_at = clock()
        self._began = now() - self._seconds["starting"]
        self._bucket = "starting"
        self._known = False
        self._restored: int | None = None
        self._step: int | None = None
        self._earlier = _History()
        self._unread: str | None = None
        self._appender: Appender | None = None
        if path is not None:
            lines, self._unread = read_lines(path, token)
            self._earlier, self._appender = _history(lines), Appender(path)
        self.fault: str | None = None
        self.hooks: Mapping[str, float] = {}
        """Name -> seconds that the loop has spent in each hook, kept by who calls them."""
        self._write(mark=False)

    def enter(self, bucket: str) -> None:
        """From now on time goes to `bucket`."""
        assert bucket in self._seconds, bucket
        with self._counting:
            at = self._clock()
            self._seconds[self._bucket] += at - self._since
            self._bucket, self._since = bucket, at

    @contextlib.contextmanager
    def spending(self, bucket: str) -> Iterator[None]:
        """Time goes to `bucket` inside, and then to the one before again."""
        before = self._bucket
        self.enter(bucket)
        try:
            yield
        finally:
            self.enter(before)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` for `target` that went to `source`, as far as it has as many."""
        self.enter(self._bucket)  # what has passed up to here
        with self._counting:
            moved = max(0.0, min(seconds, self._seconds[source]))
            self._seconds[source] -= moved
            self._seconds[target] += moved

    def restored(self, step: int | None) -> None:
        """This start goes on from the checkpoint of `step`; None: it begins anew, from nothing.

        What earlier starts did after it is lost. Until this is called nothing is.
        """
        self._known, self._restored, self._step = True, step, step
        self._earlier.throw_away(step)
        self._write(mark=False)

    def mark(self, step: int) -> None:
        """A checkpoint of `step` is being taken: who restores it loses nothing up to here."""
        self._step = step
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
        self._write(mark=kept and self._step is not None)
        with self._writing:
            if self._appender is not None:
                self._appender.close()
                self._appender = None

    def summary(self) -> Goodput:
        """Of all starts up to now."""
        seconds, spent = self._earlier.seconds(), self._spent()
        for bucket in BUCKETS:
            seconds[bucket] += spent[bucket]
        down = self._earlier.down_seconds
        if self._earlier.starts:
            down += max(0.0, self._began - self._earlier.ended)
        return Goodput(seconds, len(self._earlier.starts) + 1, down, self._of_hooks())

    def _spent(self) -> Seconds:
        with self._counting:
            seconds = dict(self._seconds)
            seconds[self._bucket] += self._clock() - self._since
        taken = min(math.fsum(self.hooks.values()), seconds["productive"])
        seconds["productive"] -= taken
        seconds["hooks"] += taken
        return seconds

    def _of_hooks(self) -> dict[str, float]:
        """Those that took a millisecond and more."""
        return {name: round(took, 3) for name, took in self.hooks.items() if took >= 1e-3}

    def _write(self, *, mark: bool) -> None:
        with self._writing:  # a beat of another thread does not come after what is newer
            self._written_at = self._clock()
            if self._appender is None:
                return
            line = Line(
                start=self._token,
                known=self._known,
                restored=self._restored,
                step=self._step,
                mark=mark,
                at=self._now(),
                seconds=self._spent(),
                hooks=self._of_hooks(),
            )
            self.fault = self._appender.append(line) or self._unread


@dataclasses.dataclass
class _Start:
    """What is left of an earlier start."""

    began: float
    ended: float
    seconds: Seconds
    marks: list[tuple[int, Seconds]]
    line: Line
    """The last one."""

    def cut(self, step: int | None) -> None:
        """Throw away what was done after the last mark up to `step`, or all where there is none."""
        while self.marks and (step is None or self.marks[-1][0] > step):
            self.marks.pop()
        base = self.marks[-1][1] if self.marks else nothing_spent()
        goes = [bucket for bucket in BUCKETS if bucket not in _STAYS]
        lost = math.fsum(self.seconds[bucket] - base[bucket] for bucket in goes)
        if lost > 0:  # it can be less, where seconds were moved after the mark
            self.seconds = self.seconds | {bucket: base[bucket] for bucket in goes}
            self.seconds["lost"] += lost


@dataclasses.dataclass
class _History:
    """The earlier starts of a run, the first one first."""

    starts: list[_Start] = dataclasses.field(default_factory=list)
    down_seconds: float = 0.0

    @property
    def ended(self) -> float:
        return self.starts[-1].ended

    def throw_away(self, step: int | None) -> None:
        for start in self.starts:  # those before the one with the mark end at theirs already
            start.cut(step)

    def seconds(self) -> Seconds:
        return {
            bucket: math.fsum(start.seconds[bucket] for start in self.starts) for bucket in BUCKETS
        }


def _history(lines: Iterator[Line]) -> _History:
    """The starts that `lines` tell of, each with what the later ones have left of it."""
    starts: dict[int, _Start] = {}
    newest = 0
    for line in lines:
        if line.start < newest:  # of a start that is over, and did not know it
            continue
        newest, total = line.start, math.fsum(line.seconds.values())
        if newest not in starts:
            starts[newest] = _Start(line.at - total, line.at, line.seconds, [], line)
        start = starts[newest]
        if total < math.fsum(start.seconds.values()) - 1e-6:  # time does not run back
            continue
        start.seconds, start.ended, start.line = line.seconds, max(start.ended, line.at), line
        if line.mark and line.step is not None:
            start.marks.append((line.step, line.seconds))
    history = _History()
    for start in starts.values():
        if start.line.known:
            history.throw_away(start.line.restored)
        if history.starts:
            history.down_seconds += max(0.0, start.began - history.ended)
        history.starts.append(start)
    return history

"""Notice that a source which is read again from its start yields other rows than before.

A loader or an iterator cannot start in the middle: batches that were done are read again, and
skipped. Only if they are the same as before is every row of the epoch trained on once.
"""

import dataclasses
import zlib
from typing import Any

from replicax.core.ground.job import Job
from replicax.core.ground.leaves import PyTree, describe_leaves

_Sums = list[str | None]
"""A checksum for each process; None for one whose rows need not be read to be skipped."""
ALWAYS = 2
"""Passes that began with the same batch, after which the source is taken to have a fixed order."""


def checksums(rows: PyTree | None, job: Job) -> _Sums:
    """Return the checksum of each process's `rows` of a batch; all processes must call it."""
    mine = None
    if rows is not None:
        text = "\n".join(f"{path} {about}" for path, about in describe_leaves(rows).items())
        mine = f"{zlib.crc32(text.encode()):08x}"
    return job.gather("a checksum of the data", mine)


def difference(then: _Sums | None, now: _Sums) -> str | None:
    """Return `1a2b3c4d -> 5e6f7081` for the first process whose rows have changed, if any."""
    for process, (old, new) in enumerate(zip(then or [], now, strict=False)):
        if None not in (old, new) and old != new:
            where = f" in process {process}" if len(now) > 1 else ""
            return f"{old} -> {new}{where}"
    return None


@dataclasses.dataclass(frozen=True)
class LastBatch:
    """The newest batch that was trained on; its checksum is taken only if it is needed."""

    rows: PyTree | None = None
    """This process's rows; see `Batch.host`."""
    told: _Sums | None = None
    """The checksums of all processes, if a checkpoint has them."""

    def checksums(self, job: Job) -> _Sums:
        return checksums(self.rows, job) if self.told is None else self.told


class FirstBatch:
    """The batch that each pass over a source begins with.

    A source that is shuffled begins with another one in each pass, which is no change. So a change
    is reported only between two starts, and only if all passes before began with the same batch.
    """

    def __init__(self) -> None:
        self._sums: _Sums | None = None
        self._passes, self._varies, self._resumed = 0, False, False

    def save_state(self) -> dict[str, Any]:
        return {"sums": self._sums, "passes": self._passes, "varies": self._varies}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sums, self._passes = state["sums"], state["passes"]
        self._varies, self._resumed = state["varies"], True

    def begins(self, rows: PyTree | None, job: Job) -> str | None:
        """Note the first batch of a pass; return how it has changed since an earlier start."""
        if self._varies:
            return None
        now, resumed, self._resumed = checksums(rows, job), self._resumed, False
        changed = difference(self._sums, now)
        fixed = self._passes >= ALWAYS
        if changed is None:
            self._passes += 1
        elif resumed:
            self._passes = 1
        else:
            self._varies = True
        self._sums = now
        return changed if resumed and fixed else None

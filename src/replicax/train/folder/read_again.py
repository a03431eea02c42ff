"""Notice that a source which is read again from its start yields other rows than before.

A loader or an iterator cannot start in the middle: batches that were done are read again, and
skipped. Only if they are the same as before is every row of the epoch trained on once.
"""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from replicax.core.data.feed import Feed
from replicax.core.data.share import FeedItem
from replicax.core.ground.job import Job
from replicax.core.ground.leaves import PyTree, describe_leaves
from replicax.errors import ConfigError

_Sums = list[str | None]
"""A checksum for each process; None for one whose rows need not be read to be skipped."""
HOW_TO_SEED = (
    "give it generator=torch.Generator() and set loader.set_epoch = loader.generator.manual_seed, "
    "or use torchdata.stateful_dataloader.StatefulDataLoader"
)
"""Code that gives a PyTorch loader which shuffles the same order in every start."""
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


class FirstBatch:
    """The batch that each pass over a source begins with.

    A source that is shuffled begins with another one in each pass, which is no change. So a change
    is reported only between two starts, and only if all passes before began with the same batch.
    """

    def __init__(self) -> None:
        self._sums: _Sums | None = None
        self._passes, self._varies, self._resumed = 0, False, False
        self.may_differ = False
        """Whether this pass is the first of a start that resumed, of a source that is shuffled."""
        self.repeated = 0
        """Number of processes, if all of them began this pass with the same rows."""

    def save_state(self) -> dict[str, Any]:
        return {"sums": self._sums, "passes": self._passes, "varies": self._varies}

    def load_state(self, state: dict[str, Any]) -> None:
        self._sums, self._passes = state["sums"], state["passes"]
        self._varies, self._resumed = state["varies"], True

    def begins(self, rows: PyTree | None, job: Job) -> str | None:
        """Note the first batch of a pass; return how it has changed since an earlier start."""
        resumed, self._resumed = self._resumed, False
        self.may_differ, self.repeated = resumed and self._varies, 0
        if self._varies:
            return None
        now = checksums(rows, job)
        self.repeated = len(now) if None not in now and len({*now}) == 1 < len(now) else 0
        changed = difference(self._sums, now)
        fixed = self._passes >= ALWAYS
        if changed is None:
            self._passes += 1
        elif resumed:
            self._passes, self.may_differ = 1, not fixed
        else:
            self._varies = True
        self._sums = now
        return changed if resumed and fixed else None


class RereadCheck:
    """Compares a run's source, at the start of each pass, with what it yielded before."""

    last: Callable[[], _Sums]
    """Returns the checksums of the newest batch that was trained on; taken only if needed."""

    def __init__(
        self, job: Job, say: Callable[[str], None], alarm: Callable[[str], None], *, accept: bool
    ) -> None:
        self._first, self._told = FirstBatch(), False
        self._job, self._say, self._alarm, self._accept = job, say, alarm, accept
        self.trained_on(None)

    def trained_on(self, rows: PyTree | None) -> None:
        """Note this process's rows of the newest batch; see `Batch.host`."""
        self.last = partial(checksums, rows, self._job)

    def save_state(self) -> dict[str, Any]:
        return {"last_batch": self.last(), "first_batch": self._first.save_state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `save_state` returned; a part that is missing is not compared."""
        last = state.get("last_batch", [])
        self.last = lambda: last
        if "first_batch" in state:
            self._first.load_state(state["first_batch"])

    def check(self, feed: Feed, batch: FeedItem, *, begun: bool) -> None:
        """Compare the first `batch` of a pass, or the rows that `feed` skipped just before it.

        Raises:
            ConfigError: they have changed, and no step has begun in this start.
        """
        if feed.first == 0:
            if changed := self._first.begins(batch.host, self._job):
                self._say(f"change data: the first batch of an epoch {changed}")
            if self._first.repeated and feed.source.of_each_process and not self._told:
                self._told = True
                self._alarm(
                    f"all {self._first.repeated} processes begin with the same rows; each is to "
                    "yield others, or every row is trained on so many times: divide them by "
                    "job.process, or pass arrays or a Grain MapDataset without rx.ProcessLocal"
                )
            if self._first.may_differ and not feed.source.order_is_known:
                self._say(
                    f"order  of epoch {feed.epoch + 1}: perhaps another than without the stop, as "
                    "the source shuffles by itself; give it a method set_epoch(epoch) and draw its "
                    "order from the epoch"
                )
            return
        if (changed := difference(self.last(), checksums(feed.skipped, self._job))) is None:
            return
        what = f"batch {feed.first - 1} of epoch {feed.epoch}"
        remedy = (
            HOW_TO_SEED
            if feed.source.draws_order
            else "draw its order only from the epoch, which a method set_epoch(epoch) is given"
        )
        why = (
            "the source has another order or other rows than before, so that some rows are "
            f"repeated and others left out; {remedy}"
        )
        if feed.source.has_state:
            why = (
                "the loader's state does not have all that it knows, such as the buffer of a "
                "shuffle, so that some rows are repeated and others left out; shuffle without a "
                "buffer"
            )
        text = f"{what} is not the one that was trained on ({changed}): {why}"
        self._changed(f"{what} {changed}", text, begun=begun)

    def check_end(self, feed: Feed, *, begun: bool) -> None:
        """Compare the number of batches of an epoch that has ended; all processes must call it."""
        ends = self._job.gather("the end of the data", feed.ended)
        if None in ends:
            return
        had, done = max(ends), f"{feed.first} were trained on"
        text = (
            f"epoch {feed.epoch} has {had} batches now, and {done}: the source has lost rows, so "
            "that the rest of the epoch is missing; pass all of it"
        )
        brief = f"epoch {feed.epoch} has {had} batches, and {done}"
        self._changed(brief, text, begun=begun)

    def _changed(self, brief: str, text: str, *, begun: bool) -> None:
        """Raise `ConfigError` for a change, unless it is accepted or a step has begun."""
        if self._accept:
            self._say(f"change data: {brief} (accepted)")
            return
        text += ", or continue anyway (--accept-changes, or accept_changes=True)"
        if not begun:
            raise ConfigError(text)
        self._alarm(text)  # the run went back, and is not ended by that

"""Feed one epoch of batches `[rows, ...]`: padded to one size, sharded, and prefetched."""

import contextlib
import dataclasses
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from replicax.core.data.batch import Batch, mask_and_count
from replicax.core.data.loader_state import LoaderState
from replicax.core.data.rows import OpenedRows
from replicax.core.data.share import FeedItem, Share
from replicax.core.data.sources import ArraySource, PerProcessSource, Source
from replicax.core.ground.job import Alone, Job
from replicax.core.ground.leaves import PyTree
from replicax.errors import ConfigError, DataError

_POLL_SECONDS = 0.5
_AHEAD = 2
"""Batches that are read ahead of the loop by default."""


class GaveUpError(Exception):
    """Raised in place of a batch that the source did not deliver before the run had to stop."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The split of a batch's rows over replicas, then over micro-batches."""

    replicas: int
    micro_batches: int

    def padded(self, batch_size: int) -> int:
        """Return `batch_size` rounded up to equal micro-batches of at least one row."""
        parts = self.replicas * self.micro_batches
        if batch_size < parts:
            micro = f" x {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
            raise ConfigError(
                f"a batch of {batch_size} rows on {self.replicas} replicas{micro}; each needs at "
                f"least one row: raise the batch size to at least {parts}, or use fewer devices"
            )
        return -(-batch_size // parts) * parts

    def padded_set(self, rows: int, real: int, size: int) -> int:
        """Return the size of a set of `rows` in a batch of `size` rows, of which some are `real`.

        It has equal micro-batches, some of which may have only padding. Another number of rows has
        another size, so that nobody takes the rows of a set for those of the batch.
        """
        parts = self.replicas * self.micro_batches
        found = -(-rows // parts) * parts
        return found + parts if found == size and rows != real else found


class Feed:
    """Iterate over one epoch of `source` as `Batch`es placed on the devices.

    Every batch has the same size: a short one is padded by repeating rows, with mask 0. Host work
    and transfers run in a background thread, at most `prefetch` batches ahead; by default none of a
    generator, whose next batch may depend on what the loop has done. With 0, each batch is read in
    the loop's own thread, and Python handles signals only once the source has returned. Iterating
    again yields the same epoch from batch `first` on. In a job of several processes, all must
    iterate in the same way; each reads the rows for its own devices.

    Examples:
        >>> feed = dp.feed(source, batch_size=100, shuffle=True, epoch=3)
        >>> len(feed), sum(int(batch.mask.sum()) for batch in feed)
        (3, 256)
    """

    def __init__(
        self,
        source: Source,
        split: Split,
        sharding: NamedSharding,
        job: Job,
        *,
        epoch: int = 0,
        first: int = 0,
        prefetch: int | None = None,
        stack: int | Callable[[int], int | None] | None = None,
    ) -> None:
        self.source, self.split, self.epoch, self.first = source, split, epoch, first
        self._sharding, self._job, self.prefetch = sharding, job, prefetch
        self._stack = stack if callable(stack) else lambda _: stack
        self.wait_seconds = 0.0
        """Time the loop spent waiting for batches in the latest pass."""
        self.stops: Callable[[], bool] = lambda: False
        """Polled while the source has no batch ready; once true, the pass raises `GaveUpError`."""
        self.skipped: PyTree = None
        """This process's rows of the batch before `first`, if the latest pass had to read them."""
        self.ended: int | None = None
        """The number of batches that this process's source had, if fewer than `first`."""
        if source.batch_size:
            split.padded(source.batch_size)
        if not 0 <= first <= (first if source.batches is None else source.batches):
            raise ConfigError(
                f"first={first} in an epoch of {source.batches} batches; it must be from 0 to "
                f"{source.batches}: change it"
            )

    def at(
        self, epoch: int, first: int, stack: int | Callable[[int], int | None] | None = None
    ) -> "Feed":
        """Return the same feed for another epoch and first batch.

        Args:
            epoch: the number of the epoch.
            first: the number of the first batch.
            stack: how many batches are yielded as `Batches`, always or from the batch of a number
                on; None for a `Batch` by itself.
        """
        return Feed(
            *(self.source, self.split, self._sharding, self._job),
            epoch=epoch,
            first=first,
            prefetch=self.prefetch,
            stack=stack,
        )

    def __repr__(self) -> str:
        source, first = self.source, f", first={self.first}" if self.first else ""
        rows = "? rows" if source.rows is None else f"{source.rows:,} rows"
        batches = "?" if source.batches is None else f"{source.batches:,}"
        of = f" of {source.batch_size:,}" if source.batch_size else ""
        return f"Feed({rows} in {batches} batches{of}, epoch={self.epoch}{first})"

    def __len__(self) -> int:
        """Return the number of batches from `first` on; `TypeError` if the source has no length."""
        if self.source.batches is None:
            raise TypeError("this source does not know its length")
        return self.source.batches - self.first

    @property
    def padding(self) -> int | None:
        """Maximum number of padding rows in any batch of the epoch; None if unknown."""
        last = self.source.last_rows
        return None if last is None else self.split.padded(self.source.batch_size) - last

    def __iter__(self) -> Generator[Any]:
        if self._job.processes > 1:
            place = {"epoch": self.epoch, "first": self.first}
            self._job.agree("the data", {**self.source.fingerprint(), **place})
        topic = self._job.unique("a pass over the data")
        if self.prefetch != 0:
            # Several processes give up together, in `_own`, or not at all.
            stops = self.stops if self._job.processes == 1 else lambda: False
            items = prefetched(partial(self._batches, topic), self._depth, stops)
        else:
            items = self._batches(topic, threading.Event())
        self.wait_seconds = 0.0
        self._job.move()
        close = weakref.finalize(self, items.close)  # at the latest when the interpreter exits
        try:
            while True:
                asked = time.perf_counter()
                try:
                    batch = next(items, None)
                finally:
                    self.wait_seconds += time.perf_counter() - asked
                if batch is None:
                    return
                yield batch
        finally:
            close()
            self._job.rest()

    def _batches(self, topic: str, closing: threading.Event) -> Generator[FeedItem]:
        if isinstance(self.source, ArraySource):
            yield from self._of_arrays(self.source)
            return
        own = isinstance(self.source, PerProcessSource) or self._sharding.is_fully_addressable
        made, number = self._own(topic, closing) if own else self._common(), self.first
        for batch, share in made:
            batch = dataclasses.replace(batch, feed_padding=self.padding)
            if (count := self._stack(number)) is None:
                yield share.place(batch)
            else:
                rest = (each for each, _ in itertools.islice(made, count - 1))
                yield share.place_all([batch, *rest])
            number += count or 1

    def _of_arrays(self, source: ArraySource) -> Iterator[FeedItem]:
        """Yield this process's rows of batches of arrays; those of a stack are read at once."""
        share = Share(self._sharding, self.split.padded(source.batch_size))
        order, size, number = source.order(self.epoch), source.batch_size, self.first
        here = self._sharding.is_fully_addressable
        held = np.arange(share.size) if here else share.held
        while number < -(-source.rows // size):
            count = self._stack(number)
            starts = np.arange(number, number + (count or 1)) * size
            starts = starts[starts < source.rows]
            rows = np.minimum(size, source.rows - starts)
            index = order[starts[:, None] + held % rows[:, None]]
            if count is None:
                data, own = source.taken(index[0]), index[0].astype(np.int32)
                mask, every = mask_and_count(held, rows[0])
                batch = Batch(data, mask, own, int(rows[0]), self.padding, count=every)
                yield share.place(batch)
            else:
                yield share.place_rows(source.taken(index), index, rows, self.padding, held)
            number += count or 1

    def _common(self) -> Iterator[tuple[Batch, Share]]:
        """Yield this process's rows of batches from a source that every process can read."""
        source = self.source
        if source.rows is None:
            kind = "a Grain IterDataset" if source.any_size else "an iterable of batches"
            raise ConfigError(
                f"{kind} in a job of several processes; each would read all of it: let it yield "
                "other rows in each process, and wrap it in rx.ProcessLocal(...), or pass arrays "
                "or a Grain MapDataset, which are divided"
            )
        share = Share(self._sharding, self.split.padded(source.batch_size))
        epoch = source.epoch(self.epoch, share.held, self.first)
        for number, (data, index, _) in enumerate(epoch, self.first):
            rows = min(source.batch_size, source.rows - number * source.batch_size)
            mask, every = mask_and_count(share.held, rows)
            yield Batch(data, mask, index.astype(np.int32), rows, count=every), share

    def _own(self, topic: str, closing: threading.Event) -> Iterator[tuple[Batch, Share]]:
        """Yield batches from this process's own data until all processes have run out."""
        source = self.source.own if isinstance(self.source, PerProcessSource) else self.source
        read = partial(source.epoch, self.epoch, first=source.starts(self.first))
        with contextlib.closing(self._read_apart(read, closing)) as parts:
            yield from self._together(source, parts, topic, closing)

    def _together(
        self, source: Source, own: Iterator[Any], topic: str, closing: threading.Event
    ) -> Iterator[tuple[Batch, Share]]:
        """Yield batches from what this process reads on its `own`, as long as any process does."""
        job, size = self._job if source is not self.source else Alone(), self.source.batch_size
        skipped, parts = source.starts(self.first), itertools.chain(own, itertools.repeat(None))
        data, index, share = None, np.empty(0, int), None
        before: LoaderState | None = None
        for number in itertools.count(skipped):
            rows: int | None = 0
            try:
                part = next(parts)
            except GaveUpError:
                if closing.is_set():
                    return
                rows = None
            else:
                if part is not None:
                    data, index, before = part
                    rows = len(index)
                    size = size or rows * job.processes
                    if rows > size // job.processes:
                        raise DataError(
                            f"a batch has {rows} rows and the batch size is "
                            f"{size // job.processes}; no batch may be larger: raise batch_size or "
                            "use smaller loader batches"
                        )
                if number < self.first:
                    if part is None and self.ended is None:
                        self.ended = number
                    self.skipped = data
                    continue
                if data is None and not self.first:
                    raise DataError("this process's source has no batches; it must have at least 1")
            counts = job.gather(topic, rows, cancelled=closing.is_set)
            if None in counts:
                raise GaveUpError
            if not any(counts):
                return
            if share is None:
                share = Share(self._sharding, self.split.padded(size))
                if len(share.held) * job.processes != share.size:
                    raise ConfigError(
                        f"this process holds {len(share.held)} of {share.size} rows in a job of "
                        f"{job.processes} processes; rx.ProcessLocal needs as many whole "
                        "replicas on each: change the mesh, or pass all the data to every process"
                    )
            host = data if source.batches is None or source is not self.source else None
            padded = partial(self._padded_set, real=rows or 0, size=share.size)
            mine = OpenedRows(data).with_padded_sets(padded)
            batch = mine.padded(share.size // job.processes, index * job.processes + job.process)
            mask = batch.mask if rows else np.zeros_like(batch.mask)
            every = np.full_like(mask, sum(counts))
            state = None if before is None else dataclasses.replace(before, again=1)
            told = {"rows": sum(counts), "host": host, "source_state": state}
            yield dataclasses.replace(batch, mask=mask, count=every, **told), share

    def _padded_set(self, rows: int, real: int, size: int) -> int:
        if self._job.processes > 1:
            raise DataError(
                f"an rx.ExtraRows of {rows} rows in a feed of a job of {self._job.processes} "
                "processes; each would pad its own: pass whole batches to dp.step"
            )
        return self.split.padded_set(rows, real, size)

    def _read_apart(
        self, read: Callable[[], Iterator[Any]], closing: threading.Event
    ) -> Generator[Any]:
        """Yield from `read()`; in a thread of its own if other processes wait for its counts."""
        if self._job.processes == 1 or self.prefetch == 0:
            yield from read()
            return
        depth = lambda: min(self._depth(), 1)  # noqa: E731
        yield from prefetched(lambda _: read(), depth, lambda: closing.is_set() or self.stops())

    def _depth(self) -> int:
        """Return how many batches are read ahead, once the source has been opened."""
        if self.prefetch is None:
            return 0 if self.source.is_generator else _AHEAD
        return self.prefetch


def prefetched(
    items: Callable[[threading.Event], Iterator[Any]],
    depth: Callable[[], int],
    stops: Callable[[], bool] = lambda: False,
) -> Generator[Any]:
    """Yield from `items(closing)`, run in a thread at most `depth()` items ahead.

    `depth` is called after the first item; with 0, the thread makes each item when it is asked for.
    An error in the thread is raised in place of the item. When the iteration is exhausted, closed
    or garbage-collected, `closing` is set and the thread ends. `stops` is polled while no item is
    ready; once it is true, `GaveUpError` is raised and the thread is left behind.
    """
    made: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()
    room, closing = threading.Semaphore(0), threading.Event()

    def produce() -> None:
        room.acquire()
        try:
            for number, item in enumerate(items(closing)):
                made.put((item, None))
                if not number and (ahead := depth()):
                    room.release(ahead + 1)
                room.acquire()
                if closing.is_set():
                    return
            made.put((None, StopIteration()))
        except BaseException as error:  # any error is raised in the consumer
            made.put((None, error))

    thread = threading.Thread(target=produce, name="replicax-prefetch", daemon=True)
    thread.start()
    patience_seconds = 5.0  # a hanging loader must not block its consumer
    try:
        while True:
            room.release()
            while True:
                try:
                    item, error = made.get(timeout=_POLL_SECONDS)
                    break
                except queue.Empty:
                    if stops():
                        patience_seconds = 0.0
                        raise GaveUpError from None
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item
    finally:
        closing.set()
        room.release()  # in this order: the thread wakes, and looks whether to end
        thread.join(timeout=patience_seconds)

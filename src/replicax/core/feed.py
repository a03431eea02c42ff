"""One epoch of batches on the devices: padded to one size, split, and prefetched."""

import dataclasses
import itertools
import threading
import time
from collections.abc import Generator, Iterator
from functools import partial

import jax
import numpy as np

from replicax.core.batch import Batch, masked, pad, place
from replicax.core.job import Job
from replicax.core.prefetch import Prefetch
from replicax.core.share import Share
from replicax.core.sources import PerProcessSource, Source
from replicax.errors import ConfigError, DataError


@dataclasses.dataclass(frozen=True)
class Split:
    """How the rows of a batch are divided: over replicas, then over micro-batches."""

    replicas: int
    micro_batches: int

    def padded(self, batch_size: int) -> int:
        """`batch_size` rounded up to a whole number of rows for every micro-batch of every replica.

        Raises:
            ConfigError: fewer rows than there are micro-batches in all.
        """
        parts = self.replicas * self.micro_batches
        if batch_size < parts:
            micro = f" x {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
            raise ConfigError(
                f"a batch of {batch_size} rows on {self.replicas} replicas{micro}; each needs a "
                f"row: raise the batch size to at least {parts}, or use fewer devices"
            )
        return -(-batch_size // parts) * parts


class Feed:
    """Iterates over one epoch of `source` as `Batch`es that lie where the step wants them.

    Every batch has the same size: a short one is padded by repeating rows, with mask 0. Host work
    and transfers run in a background thread, at most `prefetch` batches ahead. Iterating again
    gives the same epoch again. It begins with the epoch's batch `first`, counted from 0. In a job
    of several processes all must iterate alike; each reads the rows that lie on its devices.
    """

    def __init__(
        self,
        source: Source,
        split: Split,
        sharding: jax.sharding.Sharding,
        job: Job,
        *,
        epoch: int = 0,
        first: int = 0,
        prefetch: int = 2,
    ) -> None:
        self.source = source
        self.split = split
        self.epoch = epoch
        self.first = first
        self._sharding, self._job, self._prefetch = sharding, job, prefetch
        self._items: Prefetch[Batch] | None = None
        self._elapsed_seconds = 0.0
        if prefetch < 1:
            raise ConfigError(f"prefetch={prefetch}; at least 1 batch is made ahead: raise it")
        if source.batch_size:
            split.padded(source.batch_size)
        if not 0 <= first <= (first if source.batches is None else source.batches):
            raise ConfigError(
                f"first={first} of an epoch with {source.batches} batches; it is from 0 to "
                f"{source.batches}: change it"
            )

    def __len__(self) -> int:
        """Batches from `first` on. A `TypeError` where the source cannot tell."""
        if self.source.batches is None:
            raise TypeError("this source does not know its length")
        return self.source.batches - self.first

    @property
    def padding(self) -> int | None:
        """Most padding rows in any batch of the epoch; None where the source cannot tell."""
        last = self.source.last_rows
        return None if last is None else self.split.padded(self.source.batch_size) - last

    @property
    def wait_seconds(self) -> float:
        """Time that the loop over the newest pass has waited for a batch."""
        return self._items.wait_seconds if self._items else 0.0

    @property
    def input_wait_fraction(self) -> float:
        """Share of the newest pass's wall time that its loop waited for a batch."""
        return self.wait_seconds / self._elapsed_seconds if self._elapsed_seconds else 0.0

    def __iter__(self) -> Generator[Batch]:
        topic = self._agree()
        closing = threading.Event()
        self._items = items = Prefetch(partial(self._batches, topic, closing), self._prefetch)
        started = time.perf_counter()
        self._job.move()
        try:
            for batch in items:
                self._elapsed_seconds = time.perf_counter() - started
                yield batch
        finally:
            closing.set()
            items.close()
            self._job.rest()
            self._elapsed_seconds = time.perf_counter() - started

    def _agree(self) -> str:
        """That all processes read the same; returns a name for this pass, the same in all."""
        if self._job.processes > 1:
            place = {"epoch": self.epoch, "first": self.first}
            self._job.agree("the data", {**self.source.fingerprint(), **place})
        return self._job.unique("a pass over the data")

    def _batches(self, topic: str, closing: threading.Event) -> Generator[Batch]:
        if isinstance(self.source, PerProcessSource):
            parts = self._joint(self.source, topic, closing)
        elif self._sharding.is_fully_addressable:
            parts = self._whole()
        else:
            parts = self._shared()
        share = None
        for batch, size in parts:
            share = share or Share(self._sharding, size)
            yield place(dataclasses.replace(batch, feed_padding=self.padding), share)
        if share is None and not self.first:
            raise DataError("the source gave no batch; give at least 1")

    def _whole(self) -> Iterator[tuple[Batch, int]]:
        """Batches of which this process holds every row, each with its padded size."""
        size = self.source.batch_size
        skipped = self.first if size else 0  # else the epoch's first batch has to tell
        epoch = self.source.epoch(self.epoch, first=skipped)
        for number, (data, index) in enumerate(epoch, skipped):
            size = size or len(index)
            if number < self.first:
                continue
            padded = self.split.padded(size)
            yield pad(data, padded, _fitting(index, size)), padded

    def _shared(self) -> Iterator[tuple[Batch, int]]:
        """Of batches that every process could read, the rows that this one holds."""
        padded = self.split.padded(self.source.batch_size)
        held = Share(self._sharding, padded).held
        counts: list[int] = []

        def pick(rows: int) -> np.ndarray:
            counts.append(rows)
            return held % rows

        epoch = self.source.epoch(self.epoch, pick, self.first)
        for number, (data, index) in enumerate(epoch):
            yield masked(data, index, held < counts[number], counts[number]), padded

    def _joint(
        self, source: PerProcessSource, topic: str, closing: threading.Event
    ) -> Iterator[tuple[Batch, int]]:
        """Batches that each process has a part of, until the last one has no more."""
        processes, process = self._job.processes, self._job.process
        size, last = source.batch_size, None
        # Where this process's rows end before `first`, its last batch gives the shapes.
        own = source.own.batches
        skipped = 0 if own is None else min(self.first, max(own - 1, 0))
        epoch = itertools.chain(source.epoch(self.epoch, first=skipped), _NOTHING)
        for number, part in enumerate(epoch, skipped):
            if part is not None:
                data, index = part
                size = size or len(index) * processes
                last = data, _fitting(index, size // processes) * processes + process
            if number < self.first:
                continue
            if last is None:
                raise DataError("this process's source gave no batch; each needs at least 1")
            rows = len(last[1]) if part is not None else 0
            counts = self._job.gather(topic, rows, cancelled=closing.is_set)
            if not any(counts):
                return
            padded = self.split.padded(size)
            _check_parts(Share(self._sharding, padded), processes)
            batch = pad(last[0], padded // processes, last[1])
            real = np.arange(padded // processes) < rows
            yield masked(batch.data, batch.index, real, sum(counts)), padded


_NOTHING = itertools.repeat(None)


def _check_parts(share: Share, processes: int) -> None:
    if len(share.held) * processes != share.size:
        raise ConfigError(
            f"this process holds {len(share.held)} of {share.size} rows and there are {processes} "
            "processes; rx.PerProcess needs as many replicas on each and none on two: change the "
            "mesh, or give all the data to every process"
        )


def _fitting(index: np.ndarray, size: int) -> np.ndarray:
    """`index`, of no more than `size` rows."""
    if len(index) > size:
        raise DataError(
            f"a batch has {len(index)} rows and the batch size is {size}; no batch may be "
            "larger: raise batch_size or cut the loader's batches"
        )
    return index

"""One epoch of batches on the devices: padded to one size, split, and prefetched."""

import dataclasses
import time
from collections.abc import Generator

import jax

from replicax.data.batch import Batch, pad, place
from replicax.data.prefetch import Prefetch
from replicax.data.source import Source
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
    gives the same epoch again.
    """

    def __init__(
        self,
        source: Source,
        split: Split,
        sharding: jax.sharding.Sharding,
        *,
        epoch: int = 0,
        prefetch: int = 2,
    ) -> None:
        self.source = source
        self.split = split
        self.epoch = epoch
        self._sharding, self._prefetch = sharding, prefetch
        self._items: Prefetch[Batch] | None = None
        self._elapsed_seconds = 0.0
        if prefetch < 1:
            raise ConfigError(f"prefetch={prefetch}; at least 1 batch is made ahead: raise it")
        if source.batch_size:
            split.padded(source.batch_size)

    def __len__(self) -> int:
        """Batches in the epoch. A `TypeError` where the source cannot tell."""
        if self.source.rows is None:
            raise TypeError("this source does not know its length")
        return -(-self.source.rows // self.source.batch_size)

    @property
    def padding(self) -> int | None:
        """Most padding rows in any batch of the epoch; None where the source cannot tell."""
        if self.source.rows is None:
            return None
        size = self.source.batch_size
        last = self.source.rows - (len(self) - 1) * size
        return self.split.padded(size) - min(last, size)

    @property
    def wait_seconds(self) -> float:
        """Time that the loop over the newest pass has waited for a batch."""
        return self._items.wait_seconds if self._items else 0.0

    @property
    def input_wait_fraction(self) -> float:
        """Share of the newest pass's wall time that its loop waited for a batch."""
        return self.wait_seconds / self._elapsed_seconds if self._elapsed_seconds else 0.0

    def __iter__(self) -> Generator[Batch]:
        self._items = items = Prefetch(self._batches, self._prefetch)
        started = time.perf_counter()
        try:
            for batch in items:
                self._elapsed_seconds = time.perf_counter() - started
                yield batch
        finally:
            items.close()
            self._elapsed_seconds = time.perf_counter() - started

    def _batches(self) -> Generator[Batch]:
        size, empty = self.source.batch_size, True
        for data, index in self.source.epoch(self.epoch):
            size, empty = size or len(index), False
            if len(index) > size:
                raise DataError(
                    f"a batch has {len(index)} rows and the batch size is {size}; no batch may be "
                    "larger: raise batch_size or cut the loader's batches"
                )
            batch = pad(data, self.split.padded(size), index)
            yield place(dataclasses.replace(batch, feed_padding=self.padding), self._sharding)
        if empty:
            raise DataError("the source gave no batch; give at least 1")

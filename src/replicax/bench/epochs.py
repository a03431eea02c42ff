"""Batches of one epoch after another, with a clock on the waiting."""

import time
from collections.abc import Iterator
from typing import Any

from replicax.core.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.core.job import Job
from replicax.core.sources import Source, as_source, can_shuffle
from replicax.errors import ConfigError


class Epochs:
    """The batches of `source` without an end, each epoch shuffled anew where the source can."""

    def __init__(self, dp: DataParallel, source: Any, batch_size: int, seed: int) -> None:
        shuffle = can_shuffle(source)
        self._dp = dp
        self._source: Source = as_source(source, batch_size, dp.job, shuffle=shuffle, seed=seed)
        self._epoch = 0
        self._batches: Iterator[Batch] | None = None
        self.wait_seconds = 0.0
        """Time that `next` has taken, the change of epochs included."""

    def __iter__(self) -> "Epochs":
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        if self._batches is None:
            self._batches = iter(self._dp.feed(self._source, epoch=self._epoch))
        batch = next(self._batches, None)
        if batch is None:
            self._epoch += 1
            self._batches = iter(self._dp.feed(self._source, epoch=self._epoch))
            batch = next(self._batches)  # no epoch is empty
        self.wait_seconds += time.perf_counter() - started
        return batch

    def close(self) -> None:
        """End the thread that makes batches ahead."""
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


def check_source(source: Any, batch_size: int, job: Job) -> bool:
    """Whether `source` can be cut into batches of any size.

    Raises:
        ConfigError: it can be read once only, or gives batches of another size.
    """
    if isinstance(source, Iterator):
        raise ConfigError(
            f"the source is a {type(source).__name__}, which can be read once, and every case "
            "reads it; give arrays, a Grain dataset, or a loader that can be iterated again"
        )
    opened = as_source(source, batch_size, job, shuffle=False, seed=0)
    if opened is source and opened.batch_size != batch_size:
        raise ConfigError(
            f"the source has batches of {opened.batch_size} rows and batch_size={batch_size}; they "
            "are the same: change one"
        )
    return opened is not source and opened.any_size

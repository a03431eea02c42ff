"""`PerProcess`: data of which each process has rows of its own."""

import dataclasses
from typing import Any

import jax

from replicax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class PerProcess:
    """Marks data that this process alone reads, for `dp.feed` and `rx.fit`.

    Without it, arrays and Grain MapDatasets are the whole data, the same in every process, and each
    process takes its part of every batch. With it, `data` is the part already: a loader that shards
    by process, say. Processes may have different numbers of batches; those that run out feed
    batches without any weight until the last one is done, so that all results stay exact.
    """

    data: Any
    """Arrays, a Grain dataset, or an iterable of batches: whatever `dp.feed` takes."""

    def part(self, batch_size: int) -> int:
        """Rows of this process in a global batch of `batch_size`.

        Raises:
            ConfigError: the processes do not divide it.
        """
        processes: int = jax.process_count()
        if batch_size % processes:
            raise ConfigError(
                f"batch_size={batch_size} of rx.PerProcess data on {processes} processes leaves a "
                f"remainder; each gives as many rows: use a multiple of {processes}"
            )
        return batch_size // processes

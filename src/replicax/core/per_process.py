"""`PerProcess`: data of which each process has rows of its own."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from replicax.core.job import Job
from replicax.errors import ConfigError

if TYPE_CHECKING:
    from replicax.core.sources import Pick, Rows, Source


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


class PerProcessSource:
    """Rows of this process's own: its part of each global batch.

    The processes may have different numbers of rows: an epoch lasts as long as one of them has any.
    """

    def __init__(self, own: "Source", batch_size: int | None, job: Job) -> None:
        self.own = own
        self.batch_size = batch_size or own.batch_size * job.processes
        self._rows = _of_all(own.rows, job)

    @property
    def rows(self) -> int | None:
        return sum(self._rows) if self._rows else None

    @property
    def batches(self) -> int | None:
        return -(-max(self._rows) // self.own.batch_size) if self._rows else None

    @property
    def last_rows(self) -> int | None:
        if self.batches is None:
            return None
        before = (self.batches - 1) * self.own.batch_size
        return sum(max(rows - before, 0) for rows in self._rows)

    def epoch(self, number: int, pick: "Pick | None" = None, first: int = 0) -> "Iterator[Rows]":
        """The batches of this process alone; `Feed` joins them with those of the others."""
        del pick
        yield from self.own.epoch(number, first=first)

    def fingerprint(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "per_process": True}


def part_of(batch_size: int, processes: int) -> int:
    """Rows of each process in a global batch of `batch_size`.

    Raises:
        ConfigError: the processes do not divide it.
    """
    if batch_size % processes:
        raise ConfigError(
            f"batch_size={batch_size} of rx.PerProcess data on {processes} processes leaves a "
            f"remainder; each gives as many rows: use a multiple of {processes}"
        )
    return batch_size // processes


def _of_all(rows: int | None, job: Job) -> list[int]:
    """The rows of each process; nothing where one cannot tell."""
    told = job.gather("rows of each process", rows)
    known = [count for count in told if count is not None]
    return known if len(known) == len(told) else []

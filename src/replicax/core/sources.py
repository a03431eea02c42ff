"""Where rows come from: arrays in memory, a Grain dataset, or an iterable of host batches.

A source gives one epoch at a time as `(data, index)` pairs: a pytree of fresh host arrays with at
most `batch_size` rows, and the index of each row in the source.
"""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from replicax.core.batch import PyTree, host_rows, row_count
from replicax.core.digest import describe_leaves
from replicax.core.job import Job
from replicax.errors import ConfigError, DataError, require

Rows = tuple[PyTree, np.ndarray]
Pick = Callable[[int], np.ndarray]
"""Rows in a batch -> which of them are wanted, by position in the batch; some may be repeated."""


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


class Source(Protocol):
    """One pass over the data at a time."""

    batch_size: int
    """Rows of every batch but the last; 0 where only the first batch will tell."""
    rows: int | None
    """Rows in an epoch, where that is known beforehand."""
    batches: int | None
    """Batches in an epoch, where that is known beforehand."""
    last_rows: int | None
    """Rows of the last batch, which has the fewest, where that is known beforehand."""

    def epoch(self, number: int, pick: Pick | None = None, first: int = 0) -> Iterator[Rows]:
        """The batches of epoch `number`, counted from 0, from its batch `first` on.

        With `pick`, of each the rows that it wants.
        """

    def fingerprint(self) -> dict[str, Any]:
        """What processes that read the same data have the same of."""


def as_source(data: Any, batch_size: int | None, job: Job, *, shuffle: bool, seed: int) -> Source:
    """The `Source` for `data`.

    Args:
        data: a dict or tuple of arrays with one leading row dim, or one array; a Grain dataset; an
            iterable of host batches; any of these in a `PerProcess`; or a source already, which is
            given back.
        batch_size: rows of a batch. Only an iterable may leave it out: its first batch decides.
        job: of the processes that read.
        shuffle: whether each epoch has an order of its own, drawn from `seed` and its number.
        seed: any int.

    Raises:
        ConfigError: a batch size below 1 or missing, or `shuffle` with an iterable.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}; a batch has at least 1 row: raise it")
    if isinstance(data, (ArraySource, GrainSource, IterableSource, PerProcessSource)):
        return data
    if isinstance(data, PerProcess):
        part, remainder = divmod(batch_size or 0, count := job.processes)
        if remainder:
            raise ConfigError(
                f"batch_size={batch_size} of rx.PerProcess data on {count} processes leaves a "
                f"remainder; each gives as many rows: use a multiple of {count}"
            )
        own = as_source(data.data, part or None, job, shuffle=shuffle, seed=seed)
        return PerProcessSource(own, job)
    if not isinstance(data, Iterable) and not _is_grain(data, "MapDataset"):
        raise ConfigError(
            f"the source is a {type(data).__name__}; give a dict of arrays, a Grain dataset, or an "
            "iterable of host batches"
        )
    is_grain = _is_grain(data, "MapDataset", "IterDataset")
    if shuffle and not can_shuffle(data):
        kind = "a Grain IterDataset" if is_grain else "an iterable of batches"
        raise ConfigError(
            f"shuffle=True with {kind}, which has an order of its own; shuffle inside it, or give "
            "arrays or a Grain MapDataset"
        )
    if is_grain or _is_arrays(data):
        if batch_size is None:
            raise ConfigError(
                "batch_size is missing; arrays and Grain datasets must be cut: give batch_size=..."
            )
        ordered = GrainSource if is_grain else ArraySource
        return ordered(data, batch_size, shuffle, seed)
    return IterableSource(data, batch_size or 0)


class _Ordered:
    """Rows in an order that is drawn from a seed."""

    def __init__(self, rows: int | None, batch_size: int, shuffle: bool, seed: int) -> None:
        self.rows, self.batch_size = rows, batch_size
        self.batches = None if rows is None else -(-rows // batch_size)
        self.last_rows = None if rows is None else (rows - 1) % batch_size + 1
        self._shuffle, self._seed = shuffle, seed

    def _about(self, some: PyTree) -> dict[str, Any]:
        """The fingerprint, with a checksum of some rows."""
        return {
            "rows": self.rows,
            "batch_size": self.batch_size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "leaves": describe_leaves(some),
        }


class ArraySource(_Ordered):
    """Arrays in memory (or memory-mapped): any row at any time."""

    def __init__(self, data: PyTree, batch_size: int, shuffle: bool, seed: int) -> None:
        super().__init__(row_count(data), batch_size, shuffle, seed)
        self._data = jax.tree.map(np.asarray, data)
        if not self.rows:
            raise DataError("the source has 0 rows; give at least 1")

    def epoch(self, number: int, pick: Pick | None = None, first: int = 0) -> Iterator[Rows]:
        order = np.arange(self.rows or 0)
        if self._shuffle:
            order = np.random.default_rng([self._seed, number]).permutation(len(order))
        for start in range(first * self.batch_size, len(order), self.batch_size):
            index = order[start : start + self.batch_size]
            if pick is not None:
                index = index[pick(len(index))]
            taken = jax.tree.map(lambda leaf, index=index: leaf[index], self._data)  # fresh arrays
            yield host_rows(taken, copy=False), index

    def fingerprint(self) -> dict[str, Any]:
        some = np.unique(np.linspace(0, (self.rows or 1) - 1, num=16).astype(np.int64))
        return self._about(jax.tree.map(lambda leaf: leaf[some], self._data))


class GrainSource(_Ordered):
    """A Grain dataset whose elements are rows; Grain shuffles, reads ahead and batches them."""

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool, seed: int) -> None:
        self._grain = require("grain", "data")
        self._random_access = isinstance(dataset, self._grain.MapDataset)
        super().__init__(len(dataset) if self._random_access else None, batch_size, shuffle, seed)
        self._dataset = dataset

    def epoch(self, number: int, pick: Pick | None = None, first: int = 0) -> Iterator[Rows]:
        if not self._random_access:
            _refuse_pick(pick, "a Grain IterDataset")
            batches = self._dataset.batch(self.batch_size, drop_remainder=False)
            yield from itertools.islice(_counted(batches), first, None)
            return
        rows, size = self._dataset.map_with_index(lambda index, row: (row, index)), self.batch_size
        if self._shuffle:
            seed = np.random.SeedSequence([self._seed, number]).generate_state(1)[0]
            rows = rows.shuffle(seed=int(seed))
        rows = rows[first * size :]
        if not len(rows):
            return
        if pick is not None:
            starts = range(0, len(rows), size)
            parts = [start + pick(min(size, len(rows) - start)) for start in starts]
            rows, size = self._grain.MapDataset.source(_Picked(rows, parts)), len(parts[0])
        for data, index in rows.batch(size, drop_remainder=False).to_iter_dataset():
            yield host_rows(data, copy=True), np.asarray(index)

    def fingerprint(self) -> dict[str, Any]:
        return self._about(self._dataset[0] if self._random_access else None)


class IterableSource:
    """Host batches from anything that can be iterated, in its own order.

    The batches are copied, so that a loader may reuse its buffers.
    """

    rows: int | None = None
    batches: int | None = None
    last_rows: int | None = None

    def __init__(self, batches: Iterable[Any], batch_size: int) -> None:
        self.batch_size = batch_size
        self.is_iterator = isinstance(batches, Iterator)
        self._batches = batches
        self._was_read = False

    def epoch(self, number: int, pick: Pick | None = None, first: int = 0) -> Iterator[Rows]:
        _refuse_pick(pick, "an iterable of batches")
        place = -1
        for place, rows in enumerate(_counted(self._batches)):
            if place >= first:
                yield rows
        if place < 0 and self._was_read:
            raise DataError(
                f"the source gave no batch when read again in epoch {number}; a generator can be "
                "read once: give a list, or a loader that can be iterated again"
            )
        self._was_read = True

    def fingerprint(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size}


class PerProcessSource:
    """Rows of this process's own: its part of each global batch.

    The processes may have different numbers of rows: an epoch lasts as long as one of them has any.
    """

    rows: int | None = None
    batches: int | None = None
    last_rows: int | None = None

    def __init__(self, own: Source, job: Job) -> None:
        self.own, self.batch_size = own, own.batch_size * job.processes
        rows = job.gather("rows of each process", own.rows)
        if None not in rows:
            self.rows, self.batches = sum(rows), -(-max(rows) // own.batch_size)
            before = (self.batches - 1) * own.batch_size
            self.last_rows = sum(max(count - before, 0) for count in rows)

    def epoch(self, number: int, pick: Pick | None = None, first: int = 0) -> Iterator[Rows]:
        yield from self.own.epoch(number, first=first)

    def fingerprint(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "per_process": True}


def can_repeat(source: Source) -> bool:
    """Whether an epoch of `source` can be read again; an iterator is read once."""
    own = source.own if isinstance(source, PerProcessSource) else source
    return not isinstance(own, IterableSource) or not own.is_iterator


class _Picked:
    """The rows of a Grain dataset at given places, in that order."""

    def __init__(self, rows: Any, parts: list[np.ndarray]) -> None:
        self._rows, self._places = rows, np.concatenate(parts)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: int) -> Any:
        return self._rows[int(self._places[number])]


def can_shuffle(data: Any) -> bool:
    """Whether the rows of `data` can be had in any order."""
    if isinstance(data, PerProcess):
        return can_shuffle(data.data)
    return _is_arrays(data) or _is_grain(data, "MapDataset")


def _is_arrays(data: Any) -> bool:
    return isinstance(data, (Mapping, tuple, np.ndarray, jax.Array))


def _is_grain(data: Any, *kinds: str) -> bool:
    grain = sys.modules.get("grain")  # a dataset cannot be here unless its library is
    return grain is not None and isinstance(data, tuple(getattr(grain, kind) for kind in kinds))


def _counted(batches: Iterable[Any]) -> Iterator[Rows]:
    """Batches with running row indices."""
    first = 0
    for batch in batches:
        data = host_rows(batch, copy=True)
        rows = row_count(data)
        if not rows:
            raise DataError(f"a batch after row {first} has 0 rows; give at least 1")
        yield data, np.arange(first, first + rows)
        first += rows


def _refuse_pick(pick: Pick | None, source: str) -> None:
    if pick is not None:
        raise ConfigError(
            f"{source} in a job of several processes; each would read all of it: wrap what is this "
            "process's own in rx.PerProcess(...), or give arrays or a Grain MapDataset"
        )

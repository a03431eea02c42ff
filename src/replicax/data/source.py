"""Where rows come from: arrays in memory, a Grain dataset, or an iterable of host batches.

A source gives one epoch at a time as `(data, index)` pairs: a pytree of fresh host arrays with at
most `batch_size` rows, and the index of each row in the source.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from replicax.data.batch import PyTree, host_rows, row_count
from replicax.errors import ConfigError, DataError, require

Rows = tuple[PyTree, np.ndarray]


class Source(Protocol):
    """One pass over the data at a time."""

    rows: int | None
    """Rows in an epoch, where that is known beforehand."""
    batch_size: int
    """Rows of every batch but the last; 0 where only the first batch will tell."""

    def epoch(self, number: int) -> Iterator[Rows]:
        """The batches of epoch `number`, counted from 0."""


def as_source(data: Any, batch_size: int | None, *, shuffle: bool, seed: int) -> Source:
    """The `Source` for `data`.

    Args:
        data: a dict or tuple of arrays with one leading row dim, or one array; a Grain dataset; an
            iterable of host batches; or a source already, which is given back.
        batch_size: rows of a batch. Only an iterable may leave it out: its first batch decides.
        shuffle: whether each epoch has an order of its own, drawn from `seed` and its number.
        seed: any int.

    Raises:
        ConfigError: a batch size below 1 or missing, or `shuffle` with an iterable.
    """
    if batch_size is not None and batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}; a batch has at least 1 row: raise it")
    if isinstance(data, (ArraySource, GrainSource, IterableSource)):
        return data
    if _is_arrays(data):
        return ArraySource(data, _known(batch_size, "arrays"), shuffle, seed)
    if _is_grain(data, "MapDataset", "IterDataset"):
        return GrainSource(data, _known(batch_size, "a Grain dataset of rows"), shuffle, seed)
    if not isinstance(data, Iterable):
        raise ConfigError(
            f"the source is a {type(data).__name__}; give a dict of arrays, a Grain dataset, or an "
            "iterable of host batches"
        )
    if shuffle:
        raise ConfigError(
            "shuffle=True with an iterable of batches, which has an order of its own; "
            "shuffle inside the loader, or give arrays or a Grain MapDataset"
        )
    return IterableSource(data, batch_size or 0)


class ArraySource:
    """Arrays in memory (or memory-mapped): any row at any time."""

    def __init__(self, data: PyTree, batch_size: int, shuffle: bool, seed: int) -> None:
        self.rows: int | None = row_count(data)
        self.batch_size = batch_size
        self._data = jax.tree.map(np.asarray, data)
        self._shuffle, self._seed = shuffle, seed
        if not self.rows:
            raise DataError("the source has 0 rows; give at least 1")

    def epoch(self, number: int) -> Iterator[Rows]:
        rows = self.rows or 0
        order = np.arange(rows)
        if self._shuffle:
            order = np.random.default_rng([self._seed, number]).permutation(rows)
        for start in range(0, rows, self.batch_size):
            index = order[start : start + self.batch_size]
            taken = jax.tree.map(partial(_take, index=index), self._data)
            yield host_rows(taken, copy=False), index


class GrainSource:
    """A Grain dataset whose elements are rows; Grain shuffles, reads ahead and batches them."""

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool, seed: int) -> None:
        self._grain = require("grain", "data")
        self._random_access = isinstance(dataset, self._grain.MapDataset)
        self.rows: int | None = len(dataset) if self._random_access else None
        self.batch_size = batch_size
        self._dataset, self._shuffle, self._seed = dataset, shuffle, seed
        if shuffle and not self._random_access:
            raise ConfigError(
                "shuffle=True with a Grain IterDataset, which has no random access; "
                "shuffle the MapDataset it is made from"
            )

    def epoch(self, number: int) -> Iterator[Rows]:
        if not self._random_access:
            yield from _counted(self._dataset.batch(self.batch_size, drop_remainder=False))
            return
        rows = self._dataset.map_with_index(lambda index, row: (row, index))
        if self._shuffle:
            seed = np.random.SeedSequence([self._seed, number]).generate_state(1)[0]
            rows = rows.shuffle(seed=int(seed))
        for data, index in rows.batch(self.batch_size, drop_remainder=False).to_iter_dataset():
            yield host_rows(data, copy=True), np.asarray(index)


class IterableSource:
    """Host batches from anything that can be iterated, in its own order.

    The batches are copied, so that a loader may reuse its buffers.
    """

    def __init__(self, batches: Iterable[Any], batch_size: int) -> None:
        self.rows: int | None = None
        self.batch_size = batch_size
        self._batches = batches
        self._was_read = False

    def epoch(self, number: int) -> Iterator[Rows]:
        empty = True
        for rows in _counted(self._batches):
            empty = False
            yield rows
        if empty and self._was_read:
            raise DataError(
                f"the source gave no batch when read again in epoch {number}; a generator can be "
                "read once: give a list, or a loader that can be iterated again"
            )
        self._was_read = True


def can_shuffle(data: Any) -> bool:
    """Whether the rows of `data` can be had in any order."""
    return _is_arrays(data) or _is_grain(data, "MapDataset")


def _take(leaf: np.ndarray, index: np.ndarray) -> np.ndarray:
    """A fresh array of the rows `index`."""
    taken: np.ndarray = leaf[index]
    return taken


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


def _known(batch_size: int | None, source: str) -> int:
    if batch_size is None:
        raise ConfigError(f"batch_size is missing; {source} must be cut: give batch_size=...")
    return batch_size

"""Data sources: arrays in memory, a Grain dataset, or an iterable of host batches."""

import abc
import contextlib
import dataclasses
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import jax
import numpy as np

from replicax.core.data.grain_elements import batch_size_in, check_rows, is_grain
from replicax.core.data.host_arrays import has_columns, host_array, is_array_like
from replicax.core.data.loader_state import Loader, LoaderState
from replicax.core.data.rows import OpenedRows, opened
from replicax.core.ground.job import Job
from replicax.core.ground.leaves import PyTree, describe_leaves
from replicax.errors import ConfigError, DataError
from replicax.text.arguments import answered

_OF_LOADER = ("sampler", "batch_sampler", "dataset")
"""Attributes of a PyTorch loader that may have `set_epoch`."""


class RowsRead(NamedTuple):
    """A part of an epoch."""

    data: PyTree
    """New host arrays of at most `batch_size` rows."""
    places: np.ndarray
    """The index of each row in the source."""
    state: LoaderState | None = None
    """The state of the source before it, if the source has any."""


@answered
@dataclasses.dataclass(frozen=True)
class ProcessLocal:
    """Marks data that only this process reads, for `dp.feed` and `rx.fit`.

    Without it, arrays and Grain MapDatasets are the complete data, the same in every process, and
    each process takes its part of every batch. Processes may have different numbers of batches;
    those that run out feed batches of zero weight until the last one is done, so that all results
    stay exact.

    Examples:
        >>> mine = {"x": source["x"][:100], "y": source["y"][:100]}
        >>> for batch in dp.feed(rx.ProcessLocal(mine), batch_size=32):
        ...     state, metrics = dp.step(state, batch)
    """

    data: Any
    """Arrays, a Grain dataset, or an iterable of batches: any source that `dp.feed` accepts."""


class Source(abc.ABC):
    """Reads the data one epoch at a time, in batches of `batch_size` rows except the last.

    `batch_size` is 0 if determined by the first batch; `parts` are the rows in an epoch, one number
    per process if each has its own data, and empty if unknown.
    """

    any_size = True
    """Whether it can be split into batches of any size."""
    can_repeat = True
    """Whether an epoch can be read again; an iterator can be read only once."""
    reads_ahead = False
    """Whether the next epoch may be read while the steps of this one have not finished."""
    of_each_process = False
    """Whether each process has rows of its own."""
    rows: int | None = None
    batches: int | None = None
    last_rows: int | None = None
    """Rows and batches in an epoch, and rows in the last, smallest batch; None if unknown."""
    told_batches: int | None = None
    """Batches in an epoch as `len()` of a loader tells them, which may be wrong."""

    def __init__(self, batch_size: int, parts: Sequence[int] = ()) -> None:
        self.batch_size = batch_size
        if parts:
            own = batch_size // len(parts)
            self.rows, self.batches = sum(parts), -(-max(parts) // own)
            before = (self.batches - 1) * own
            self.last_rows = sum(max(rows - before, 0) for rows in parts)

    @property
    def order_is_known(self) -> bool:
        """Whether another start goes on in the same order: its state or the epoch decides."""
        return True

    @property
    def draws_order(self) -> bool:
        """Whether it is known to draw an order that another start does not repeat."""
        return False

    @property
    def has_state(self) -> bool:
        """Whether it has a state, as far as that is known before it is read."""
        return False

    @abc.abstractmethod
    def epoch(
        self, number: int, held: np.ndarray | None = None, first: int = 0
    ) -> Iterator[RowsRead]:
        """Return the batches of epoch `number`, counted from 0.

        If `rows` is known, start from batch `first` and return the rows at the positions `held` of
        each batch; positions wrap around in a shorter batch.
        """

    @property
    def is_generator(self) -> bool:
        """Whether code of the caller's yields the batches, as far as known before it is read."""
        return False

    def restore(self, state: LoaderState | None) -> None:  # noqa: B027  (others need none)
        """Begin the next pass, which reads the rest of an epoch, with this state."""

    def starts(self, first: int) -> int:
        """Return the batch at which a pass from batch `first` has to begin to read."""
        # If this process's rows end before `first`, its last batch provides the shapes.
        return min(first, self.batches - 1) if self.batches else 0

    def set_epoch(self, number: int) -> None:  # noqa: B027  (others need no telling)
        """Tell a loader which epoch is read next, as far as it asks for it."""

    def fingerprint(self) -> dict[str, Any]:
        """Return fields that are equal in processes that read the same data."""
        return {"batch_size": self.batch_size}


def as_source(data: Any, batch_size: int | None, job: Job, *, shuffle: bool, seed: int) -> Source:
    """Return the `Source` for `data`: anything `DataParallel.feed` accepts, or a `Source`.

    Only an iterable may omit `batch_size`, which is then taken from its first batch. If shuffled,
    each epoch has a different order, drawn from `seed` and the epoch number.
    """
    if isinstance(data, Source):
        return data
    size, grain = batch_size or 0, is_grain(data, "MapDataset", "IterDataset")
    if isinstance(data, ProcessLocal):
        part, remainder = divmod(size, job.processes)
        if remainder:
            raise ConfigError(
                f"batch_size={size} of rx.ProcessLocal data on {job.processes} processes leaves a "
                f"remainder; each must contribute equally: use a multiple of {job.processes}"
            )
        own = as_source(data.data, part or None, job, shuffle=shuffle, seed=seed)
        return PerProcessSource(own, job)
    if isinstance(getattr(data, "source", None), Source):
        raise ConfigError(
            f"the source is a {type(data).__name__}, one epoch on these devices: pass the data "
            "that it was made of, with batch_size=..."
        )
    if isinstance(data, str | bytes) or not (grain or isinstance(data, Iterable)):
        raise ConfigError(
            f"the source is a {type(data).__name__}; pass a dict of arrays, a Grain dataset, or an "
            "iterable of host batches"
        )
    if grain and not size and not can_shuffle(data) and batch_size_in(data):
        grain = False  # an iterable of batches as any other
    if grain:
        check_rows(data, size)
    if not size and (grain or can_shuffle(data)):
        raise ConfigError(
            "batch_size is missing; arrays and Grain datasets must be split: pass batch_size=..."
        )
    if not can_shuffle(data):
        if shuffle:
            raise ConfigError(
                f"shuffle=True with {'a Grain IterDataset' if grain else 'an iterable of batches'},"
                " which has a fixed order; shuffle inside it, or pass arrays or a Grain "
                "MapDataset"
            )
        batches = data.batch(size, drop_remainder=False) if grain else data
        return IterableSource(batches, size, any_size=grain)
    if grain:
        return GrainSource(data, len(data), size, shuffle, seed)
    rows = opened(data)
    count = rows.count  # first: it rejects leaves that are not arrays
    arrays = jax.tree_util.tree_map_with_path(host_array, rows.data)
    return ArraySource(arrays, count, size, shuffle, seed)


def can_shuffle(data: Any) -> bool:
    """Whether the rows of `data` can be read in any order."""
    rows = data.data if isinstance(data, ProcessLocal) else data
    arrays = isinstance(rows, Mapping | tuple) or is_array_like(rows) or has_columns(rows)
    return arrays or is_grain(rows, "MapDataset")


class _Ordered(Source):
    """Rows that can be read in any order, drawn from a seed if they are shuffled."""

    reads_ahead = True
    rows: int

    def __init__(self, data: Any, rows: int, batch_size: int, shuffle: bool, seed: int) -> None:
        super().__init__(batch_size, [rows])
        self._data, self._shuffle, self._seed = data, shuffle, seed
        if not rows:
            raise DataError("the source has 0 rows; pass at least 1")

    def _about(self, some: PyTree) -> dict[str, Any]:
        """Return the fingerprint, with a checksum of some rows."""
        order = {"rows": self.rows, "shuffle": self._shuffle, "seed": self._seed}
        return {**super().fingerprint(), **order, "leaves": describe_leaves(some)}


class ArraySource(_Ordered):
    """Arrays in memory (or memory-mapped)."""

    def epoch(
        self, number: int, held: np.ndarray | None = None, first: int = 0
    ) -> Iterator[RowsRead]:
        order = self.order(number)
        for start in range(first * self.batch_size, self.rows, self.batch_size):
            index = order[start : start + self.batch_size]
            if held is not None:
                index = index[held % len(index)]
            yield RowsRead(self.taken(index), index)

    def order(self, epoch: int) -> np.ndarray:
        """Return the indices of the rows of an epoch in their order: int `[rows]`."""
        if not self._shuffle:
            return np.arange(self.rows)
        return np.random.default_rng([self._seed, epoch]).permutation(self.rows)

    def taken(self, index: np.ndarray) -> PyTree:
        """Return the rows at `index`, of any shape, as new arrays."""
        rows = OpenedRows(jax.tree.map(lambda leaf: leaf[index], self._data))
        return rows.on_host(copy=False).data

    def fingerprint(self) -> dict[str, Any]:
        some = np.unique(np.linspace(0, self.rows - 1, num=16).astype(np.int64))
        return self._about(jax.tree.map(lambda leaf: leaf[some], self._data))


class GrainSource(_Ordered):
    """A Grain MapDataset whose elements are rows; Grain shuffles, prefetches and batches them."""

    def epoch(
        self, number: int, held: np.ndarray | None = None, first: int = 0
    ) -> Iterator[RowsRead]:
        rows, size = self._data.map_with_index(lambda index, row: (row, index)), self.batch_size
        if self._shuffle:
            seed = np.random.SeedSequence([self._seed, number]).generate_state(1)[0]
            rows = rows.shuffle(seed=int(seed))
        rows = rows[first * size :]
        if held is not None and len(rows):
            all_rows, starts = rows, range(0, len(rows), size)
            places = [start + held % min(size, len(rows) - start) for start in starts]
            picked = sys.modules["grain"].MapDataset.source(np.concatenate(places))
            rows, size = picked.map(lambda place: all_rows[int(place)]), len(held)
        for data, index in rows.batch(size, drop_remainder=False).to_iter_dataset():
            yield RowsRead(opened(data).on_host(copy=True).data, np.asarray(index))

    def fingerprint(self) -> dict[str, Any]:
        return self._about(self._data[0])


class IterableSource(Source):
    """Host batches in the order of an iterable, copied so that it may reuse its buffers."""

    def __init__(self, batches: Iterable[Any], batch_size: int, *, any_size: bool) -> None:
        super().__init__(batch_size)
        self.any_size, self.can_repeat = any_size, not isinstance(batches, Iterator)
        self._batches, self._was_read = batches, False
        if isinstance(batches, Sized):
            with contextlib.suppress(TypeError, NotImplementedError):  # PyTorch's, of some data
                self.told_batches = len(batches)
        parts: tuple[Any, ...] = (batches, *(getattr(batches, name, None) for name in _OF_LOADER))
        self._told: list[Any] = [
            part for part in parts if callable(getattr(part, "set_epoch", None))
        ]
        self._loader = Loader(batches)
        self._restored: LoaderState | None = None

    def restore(self, state: LoaderState | None) -> None:
        self._restored = state

    def starts(self, first: int) -> int:
        return first - self._restored.again if self._restored and first else 0

    @property
    def order_is_known(self) -> bool:
        return bool(self._told) or self.has_state

    @property
    def draws_order(self) -> bool:
        sampler = getattr(self._batches, "sampler", None)  # PyTorch's that shuffle have a generator
        return hasattr(sampler, "generator") and not self.order_is_known

    @property
    def has_state(self) -> bool:
        return self._loader.has_state

    @property
    def is_generator(self) -> bool:
        return self._loader.is_generator

    def set_epoch(self, number: int) -> None:
        for part in self._told:
            part.set_epoch(number)

    def epoch(
        self, number: int, held: np.ndarray | None = None, first: int = 0
    ) -> Iterator[RowsRead]:
        saved, self._restored = self._restored, None
        start = saved.rows if saved is not None and saved.epoch == number else 0
        batches = self._loader.read(saved, number)
        before = self._state(number, start)
        for batch in batches:
            rows = opened(batch).on_host(copy=True)
            if not rows.count:
                raise DataError(f"a batch after row {start} has 0 rows; pass at least 1")
            yield RowsRead(rows.data, np.arange(start, start + rows.count), before)
            start += rows.count
            before = self._state(number, start)
        if not start and self._was_read:
            raise DataError(
                f"the source yielded no batch when read again in epoch {number}; a generator can "
                "be read only once: pass a list, or a loader that can be iterated again"
            )
        self._was_read = True

    def _state(self, epoch: int, rows: int) -> LoaderState | None:
        state = self._loader.state()
        return None if state is None else LoaderState(epoch, rows, state)


class PerProcessSource(Source):
    """Rows of this process only, part of each global batch, as long as any process has rows."""

    of_each_process = True

    def __init__(self, own: Source, job: Job) -> None:
        mine = zlib.crc32(json.dumps(own.fingerprint()).encode())
        told = job.gather("rows of each process", [own.rows, f"{mine:08x}", own.told_batches])
        parts, self._digests, batches = ([each[part] for each in told] for part in range(3))
        super().__init__(own.batch_size * job.processes, [] if None in parts else parts)
        self.own, self.can_repeat = own, own.can_repeat
        self.told_batches = None if None in batches else max(batches)

    def restore(self, state: LoaderState | None) -> None:
        self.own.restore(state)

    @property
    def order_is_known(self) -> bool:
        return self.own.order_is_known

    @property
    def draws_order(self) -> bool:
        return self.own.draws_order

    @property
    def has_state(self) -> bool:
        return self.own.has_state

    @property
    def is_generator(self) -> bool:
        return self.own.is_generator

    def set_epoch(self, number: int) -> None:
        self.own.set_epoch(number)

    def epoch(
        self, number: int, held: np.ndarray | None = None, first: int = 0
    ) -> Iterator[RowsRead]:
        return self.own.epoch(number, first=first)

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "per_process": True, "parts": self._digests}

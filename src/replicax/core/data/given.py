"""The batches of what is given for evaluation and prediction: rows, batches, feeds, or several."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from replicax.core.data.batch import Batch
from replicax.core.data.feed import Feed
from replicax.core.data.host_arrays import is_array_like
from replicax.core.data.sources import PerProcess, is_grain

Given = Iterable[Any] | dict[str, Iterable[Any]]
"""Batches, or those of several sources by name."""


def batches_given(source: Any, batch_size: int | None, feed: Callable[..., Feed]) -> Given:
    """Return the batches of a source, or of each source in a dict of them.

    Args:
        source: as for `DataParallel.evaluate`.
        batch_size: rows of a batch; without it, arrays are one batch.
        feed: `DataParallel.feed`.
    """
    if _are_sources(source):
        return {name: _batches(source[name], batch_size, feed) for name in source}
    return _batches(source, batch_size, feed)


def _batches(source: Any, batch_size: int | None, feed: Callable[..., Feed]) -> Iterable[Any]:
    if batch_size is not None or _is_cut(source):
        return feed(source, batch_size)
    return source if _is_iterated(source) or isinstance(source, list) else [source]


def _are_sources(given: Any) -> bool:
    """Whether `given` is a dict of sources, and not of arrays."""
    if not isinstance(given, Mapping) or not given:
        return False
    each = [given[name] for name in given]
    lists = all(isinstance(one, list) for one in each)
    return lists or any(_is_cut(one) or _is_iterated(one) or type(one) is Batch for one in each)


def _is_cut(source: Any) -> bool:
    """Whether only a feed knows the batches of a source."""
    return isinstance(source, PerProcess) or is_grain(source, "MapDataset", "IterDataset")


def _is_iterated(source: Any) -> bool:
    """Whether a source yields batches, other than in a list, which may also hold arrays."""
    rows = isinstance(source, Mapping | tuple | list | str | bytes) or is_array_like(source)
    return isinstance(source, Iterable) and not rows

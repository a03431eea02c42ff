"""The batches of a source, to evaluate, and its first rows, to plan and to verify.

A source is rows, batches, a Grain dataset or a feed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.data.feed import Feed
from replicax.core.data.grain_elements import is_grain
from replicax.core.data.host_arrays import is_array_like
from replicax.core.data.rows import opened
from replicax.core.data.sources import ProcessLocal, Source, as_source
from replicax.core.ground.job import Alone
from replicax.core.ground.leaves import PyTree

GivenBatches = Iterable[Any] | dict[str, Iterable[Any]]
"""Batches, or those of several sources by name."""


def batches_given(source: Any, batch_size: int | None, feed: Callable[..., Feed]) -> GivenBatches:
    """Return the batches of a source, or of each source in a dict of them.

    Args:
        source: as for `DataParallel.evaluate`.
        batch_size: rows of a batch; without it, arrays are one batch.
        feed: `DataParallel.feed`.
    """
    if _are_sources(source):
        return {name: _batches(source[name], batch_size, feed) for name in source}
    return _batches(source, batch_size, feed)


def size_given(source: Any, batch_size: int | None) -> int | None:
    """Return the rows of a batch as given, or as a feed has them; None if a batch is given."""
    return source.source.batch_size or None if isinstance(source, Feed) else batch_size


def batch_given(source: Any) -> PyTree:
    """Return the batch that a source without a batch size is, or its first."""
    if isinstance(source, Batch):
        return source.data
    if isinstance(source, Feed) or _is_iterated(source) or isinstance(source, list):
        return leading_rows(source, 1, whole=True)
    return source


def leading_rows(source: Any, rows: int, *, whole: bool = False) -> PyTree:
    """Return the first `rows` of a source, or all that it has, as host arrays or shapes.

    `whole`: all rows of the batches that have them, if the source yields batches.
    """
    if _are_shapes(source):
        return jax.tree.map(lambda leaf: leaf.update(shape=(rows, *leaf.shape[1:])), source)
    parts, count = list[Any](), 0
    for data, index, _ in opened_source(source, rows).epoch(0):
        parts.append(data)
        count += len(index)
        if count >= rows:
            break
    end = None if whole else rows
    found: PyTree = jax.tree.map(lambda *leaves: np.concatenate(leaves)[:end], *parts)
    return found


def opened_source(source: Any, rows: int) -> Source:
    """Return a source, or that of a feed, to read so many rows at a time in this process."""
    given = source.source if isinstance(source, Feed) else source
    return as_source(given, rows, Alone(), shuffle=False, seed=0)


def rows_given(source: Any) -> int | None:
    """Return the rows of a source, if they are known."""
    return opened(source).count if _are_shapes(source) else opened_source(source, 1).rows


def _are_shapes(source: Any) -> bool:
    return not isinstance(source, Feed) and any(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(source)
    )


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
    return isinstance(source, ProcessLocal) or is_grain(source, "MapDataset", "IterDataset")


def _is_iterated(source: Any) -> bool:
    """Whether a source yields batches, other than in a list, which may also hold arrays."""
    rows = isinstance(source, Mapping | tuple | list | str | bytes) or is_array_like(source)
    return isinstance(source, Iterable) and not rows

"""Rows that users pass, `[real, ...]`: opened, counted, read as NumPy arrays, padded to a batch."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from replicax.core.data.batch import Batch, ExtraRows, Replicated, map_marked, mask_and_count
from replicax.core.data.host_arrays import Path, device_array, has_columns, refuse_keys
from replicax.core.ground.leaves import PyTree, takes
from replicax.errors import DataError


@dataclasses.dataclass(frozen=True, eq=False)
class OpenedRows:
    """Rows in a tree that JAX knows: arrays of any library, or shapes.

    `opened` makes it of what users pass; a tree of which that is known is wrapped as it is.
    """

    data: PyTree

    @cached_property
    def count(self) -> int:
        """The leading dim shared by all leaves; of sets alone, the rows of the largest.

        Raises `DataError`, which names a leaf, if there is none. It is asked for, and not checked
        by `opened`: of the values of a `Replicated` and of several batches nobody asks.
        """
        counts: dict[str, int] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.data):
            refuse_keys(path, leaf)
            if not np.shape(leaf):
                number = hasattr(leaf, "dtype") or isinstance(leaf, int | float | complex)
                kind = "scalar" if number else type(leaf).__name__
                raise DataError(
                    f"batch{keystr(path)} is a {kind}; every leaf needs a leading row dim: "
                    "convert a list with np.asarray, stack single rows into batches, or repeat a "
                    "constant for every row"
                )
            counts[keystr(path)] = np.shape(leaf)[0]
        if not counts and (sizes := list(map(_rows_of_set, _sets_in(self.data)))):
            return max(sizes)
        if not counts:
            raise DataError("the batch has no arrays; pass a pytree of arrays [rows, ...]")
        (first, rows), *others = counts.items()
        for name, count in others:
            if count != rows:
                raise DataError(
                    f"batch{name} has {count} rows and batch{first} has {rows}; all leaves must "
                    "share one leading row dim: give both the same number, or pass one as "
                    "rx.ExtraRows"
                )
        return rows

    @property
    def sets(self) -> list[PyTree]:
        """The value of each `ExtraRows`, opened."""
        return [opened(node.value).data for node in _sets_in(self.data)]

    def on_host(self, *, copy: bool) -> "OpenedRows":
        """Return NumPy arrays in the dtypes used on the device.

        A device may read an array long after it was passed, or use its memory directly: arrays
        that may be written to again must be copied. 64-bit leaves become 32-bit ones unless
        `jax_enable_x64` is set, as everywhere in JAX; a value out of range raises `DataError`.
        """
        to_array = partial(device_array, copy=copy)
        return OpenedRows(jax.tree_util.tree_map_with_path(to_array, self.data))

    def with_padded_sets(self, padded: Callable[[int], int]) -> "OpenedRows":
        """Return these with each `ExtraRows` as a batch of its own; arrays of the host, or shapes.

        `padded` returns the size of a batch of so many rows.
        """
        numbers = itertools.count(1)

        def as_batch(node: Replicated | ExtraRows) -> Replicated | ExtraRows:
            if isinstance(node, Replicated) or node.rows is not None:
                return node
            rows = opened(node.value)
            size = padded(rows.count)
            if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(rows.data)):
                batch = rows.described(size)
            else:
                batch = rows.on_host(copy=True).padded(size)
            return ExtraRows(dataclasses.replace(batch, number=next(numbers)))

        return OpenedRows(map_marked(as_batch, self.data))

    def padded(self, size: int, index: np.ndarray | None = None) -> Batch:
        """Return a host batch of `size` rows: these, repeated from the first as padding.

        They are host arrays with 0 < rows <= size; `index` has each row's source index, by default
        its place.
        """
        data, index = self.data, np.arange(self.count) if index is None else index
        if self.count < size:
            repeat = np.arange(size) % self.count
            data, index = jax.tree.map(lambda leaf: leaf[repeat], (data, index))
        mask, count = mask_and_count(np.arange(size), self.count)
        return Batch(data, mask, index.astype(np.int32), self.count, count=count)

    def described(self, size: int) -> Batch:
        """Return the shapes of a batch of `size` rows like these. Its sets have their own rows."""

        def shape(leaf: Any) -> jax.ShapeDtypeStruct:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), dtype)

        data = self.with_padded_sets(lambda rows: rows).data
        one = np.ones(1, np.float32)
        batch = Batch(data, one, np.ones(1, np.int32), count=one).apart().map_rows(shape)
        values = opened(batch.shared).on_host(copy=True).data
        shared, sets = jax.eval_shape(lambda trees: trees, (values, batch.sets))
        return dataclasses.replace(batch, shared=shared, sets=sets)


def opened(data: PyTree) -> OpenedRows:
    """Return `data` with each mapping, such as an HDF5 group or a `UserDict`, as a dict.

    So are tables with columns, such as a `DataFrame`. Mappings that JAX knows as pytrees are left
    as they are.
    """

    def opened_leaf(path: Path, leaf: Any) -> Any:
        if not (isinstance(leaf, Mapping) or has_columns(leaf)):
            return leaf
        unnamed = [name for name in leaf if not isinstance(name, str)]
        if unnamed:  # more likely rows by number than columns by name
            raise DataError(
                f"batch{keystr(path)} is a {type(leaf).__name__} with the key {unnamed[0]!r}; a "
                "mapping holds columns by name: pass a dict, whose keys may be anything"
            )
        return opened({name: leaf[name] for name in leaf}).data

    try:
        jax.tree.structure(data)
    except ValueError as error:
        raise DataError(
            f"the batch has a dict with keys that JAX cannot sort ({error.__cause__ or error}): "
            "use keys of one type, such as strings"
        ) from None
    tree = jax.tree_util.tree_map_with_path(opened_leaf, data)
    if not takes(tree, object()):  # as in a tree of shardings like it
        raise DataError(
            f"the batch, a {type(data).__name__}, has a class whose constructor looks at its "
            "arguments, and JAX makes it of other things than arrays too: pass a dict"
        )
    return OpenedRows(tree)


def _sets_in(data: PyTree) -> list[ExtraRows]:
    nodes = jax.tree.leaves(data, is_leaf=lambda node: isinstance(node, ExtraRows))
    return [node for node in nodes if isinstance(node, ExtraRows)]


def _rows_of_set(node: ExtraRows) -> int:
    real = None if node.rows is None else node.rows.rows
    return opened(node.value).count if real is None else real

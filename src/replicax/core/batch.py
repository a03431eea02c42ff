"""A batch of fixed size: the user's rows, which of them are real, and where they come from."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np

from replicax.core.random_keys import is_random_key
from replicax.core.share import Share
from replicax.errors import DataError

PyTree = Any


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["data", "mask", "index"],
    meta_fields=[],
    drop_fields=["rows", "feed_padding"],
)
@dataclasses.dataclass(frozen=True)
class Batch:
    """What `DataParallel.step` takes: every array has the same leading row dim.

    Padding repeats real rows, so that a model sees nothing unusual, and has mask 0, so that
    it counts for nothing in the loss, the gradient, and the metrics.
    """

    data: PyTree
    """The user's batch: a pytree of arrays `[rows, ...]`."""
    mask: Any
    """float32 `[rows]`: 1 for a real row, 0 for padding."""
    index: Any
    """int32 `[rows]`: the row's index in its source. Padding has the index of what it repeats."""
    rows: int | None = None
    """Real rows, known on the host without asking the device; None where nobody counted."""
    feed_padding: int | None = None
    """Most padding rows in any batch of the same feed, where that is known beforehand."""

    @property
    def size(self) -> int:
        """Rows with the padding: the fixed size that the step is compiled for."""
        return int(self.mask.shape[0])


def row_count(data: PyTree) -> int:
    """The one leading dim that all leaves of `data` share.

    Raises:
        DataError: no leaf, a leaf without dims, one of random keys, or two leaves that disagree.
    """
    leaves = jax.tree_util.tree_leaves_with_path(data)
    if not leaves:
        raise DataError("the batch has no array; give a pytree of arrays [rows, ...]")
    first_path, first = leaves[0]
    for path, leaf in leaves:
        _refuse_keys(path, leaf)
        shape = np.shape(leaf)
        if not shape:
            raise DataError(
                f"batch{_name(path)} is a scalar; every leaf needs a leading row dim: "
                "make a list an array with np.asarray, or repeat a constant once a row"
            )
        if shape[0] != np.shape(first)[0]:
            raise DataError(
                f"batch{_name(path)} has {shape[0]} rows and batch{_name(first_path)} has "
                f"{np.shape(first)[0]}; all leaves share one leading row dim: give both the same"
            )
    return int(np.shape(first)[0])


def host_rows(data: PyTree, *, copy: bool) -> PyTree:
    """`data` as NumPy arrays in the dtypes that the device will hold.

    A device may read an array long after it was handed over, or keep it as its own memory: what
    somebody may write to again must be copied.

    64-bit leaves become 32-bit ones unless `jax_enable_x64` is set, as everywhere in JAX; an
    integer that does not fit is refused.

    Raises:
        DataError: a leaf is not numeric, or a number does not fit 32 bits.
    """
    return jax.tree_util.tree_map_with_path(partial(_host_leaf, copy=copy), data)


def pad(data: PyTree, size: int, index: np.ndarray) -> Batch:
    """A host batch of `size` rows: those of `data`, then the same again from the first on.

    Args:
        data: pytree of host arrays `[rows, ...]` with 0 < rows <= size.
        size: rows of the result.
        index: int `[rows]`, where each row comes from.
    """
    rows = row_count(data)
    if rows < size:
        repeat = np.arange(size) % rows
        data, index = jax.tree.map(lambda leaf: leaf[repeat], (data, index))
    return masked(data, index, np.arange(size) < rows, rows)


def masked(data: PyTree, index: np.ndarray, real: np.ndarray, rows: int) -> Batch:
    """A host batch of which only the rows where `real` is true count, `rows` of all processes."""
    return Batch(data, real.astype(np.float32), np.asarray(index, np.int32), rows)


def place(batch: Batch, share: Share) -> Batch:
    """`batch` on the devices, without waiting for the transfer.

    Args:
        batch: of host arrays `[held rows, ...]`, those of this process.
        share: of this process in the global batch.
    """
    arrays = (batch.data, batch.mask, batch.index)
    if share.sharding.is_fully_addressable:
        placed = jax.device_put(arrays, share.sharding)
    else:
        placed = jax.tree.map(share.place, arrays)
    return dataclasses.replace(batch, **dict(zip(("data", "mask", "index"), placed, strict=True)))


def described(data: PyTree, size: int) -> Batch:
    """The shapes of a batch of `size` rows such as those of `data`.

    Args:
        data: pytree of arrays `[rows, ...]`, or of their shapes.
        size: rows of the result.
    """

    def leaf_shape(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), dtype)

    mask, index = (jax.ShapeDtypeStruct((size,), dtype) for dtype in (np.float32, np.int32))
    return Batch(jax.tree.map(leaf_shape, data), mask, index)


def _host_leaf(path: tuple[Any, ...], leaf: Any, copy: bool) -> np.ndarray:
    _refuse_keys(path, leaf)
    array = np.array(leaf, copy=True) if copy else np.asarray(leaf)
    if array.dtype.kind in "OSUMm" or array.dtype.names:
        raise DataError(
            f"batch{_name(path)} has dtype {array.dtype}; a device holds numbers only: "
            "encode it as numbers, or keep it out of the batch"
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if dtype == array.dtype:
        return array
    if array.dtype.kind in "iu" and array.size:
        low, high, limits = array.min(), array.max(), np.iinfo(dtype)
        if low < limits.min or high > limits.max:
            raise DataError(
                f"batch{_name(path)} has {array.dtype} values from {low} to {high}; {dtype} holds "
                f"{limits.min} to {limits.max}: make them smaller or set jax_enable_x64"
            )
    with np.errstate(over="ignore"):
        narrow = array.astype(dtype)
    if array.dtype.kind == "f" and np.isfinite(array).sum() > np.isfinite(narrow).sum():
        raise DataError(
            f"batch{_name(path)} has {array.dtype} values up to {np.nanmax(np.abs(array))}; "
            f"{dtype} holds {np.finfo(dtype).max}: scale them or set jax_enable_x64"
        )
    return narrow


def _refuse_keys(path: tuple[Any, ...], leaf: Any) -> None:
    if isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) and is_random_key(leaf):
        raise DataError(
            f"batch{_name(path)} holds {leaf.size} random keys, which are no numbers; split the "
            "key that the loss is given, or pass jax.random.key_data and wrap it in the loss"
        )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path)

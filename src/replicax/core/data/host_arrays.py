"""Arrays of the user's data, from any library, as NumPy arrays."""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from replicax.core.ground.leaves import PyTree, is_random_key, takes
from replicax.errors import DataError

Path = tuple[Any, ...]


def opened(data: PyTree) -> PyTree:
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
        return opened({name: leaf[name] for name in leaf})

    try:
        jax.tree.structure(data)
    except ValueError as error:
        raise DataError(
            f"the batch has a dict with keys that JAX cannot sort ({error.__cause__ or error}): "
            "use keys of one type, such as strings"
        ) from None
    found = jax.tree_util.tree_map_with_path(opened_leaf, data)
    if not takes(found, object()):  # as in a tree of shardings like it
        raise DataError(
            f"the batch, a {type(data).__name__}, has a class whose constructor looks at its "
            "arguments, and JAX makes it of other things than arrays too: pass a dict"
        )
    return found


def has_columns(data: Any) -> bool:
    """Whether `data` has columns by name, which it yields, as a `DataFrame` of pandas."""
    return all(hasattr(data, name) for name in ("columns", "dtypes"))


def is_array_like(data: Any) -> bool:
    """Whether `data` is one array, of any library."""
    return hasattr(data, "shape") and hasattr(data, "dtype")


def host_array(path: Path, leaf: Any) -> np.ndarray:
    """Return `leaf` as a NumPy array, without a copy if possible, or raise `DataError`."""
    refuse_keys(path, leaf)
    torch = sys.modules.get("torch")  # a tensor implies that torch is imported
    if isinstance(leaf, np.ma.MaskedArray):
        _refuse_mask(path, leaf)
        leaf = np.ma.getdata(leaf)
    elif torch is not None and isinstance(leaf, torch.Tensor):
        leaf = _of_torch(torch, leaf)
    try:
        array = np.asarray(leaf)
    except Exception as error:  # of the other library
        said = str(error).partition("\n")[0]
        raise DataError(
            f"batch{keystr(path)} is a {type(leaf).__name__} that NumPy cannot read ({said}): "
            "convert it to a NumPy array"
        ) from error
    if array.shape != np.shape(leaf):  # NumPy takes it for one object
        raise DataError(
            f"batch{keystr(path)} is a {type(leaf).__name__}, which NumPy reads as a single "
            "object: convert it to a dense array, as x.toarray() does for SciPy"
        )
    device_dtype(path, array)
    return array


def device_dtype(path: Path, array: np.ndarray) -> np.dtype:
    """Return the dtype that `array` has on a device, or raise `DataError` if there is none."""
    refused = array.dtype.kind in "OSUMmVT" and not _is_extended(array.dtype)
    if refused or array.dtype.char in "gG":
        raise DataError(
            f"batch{keystr(path)} has dtype {array.dtype}; devices hold only numbers of up to 64 "
            "bits: encode or cast it, or remove it from the batch"
        )
    return np.dtype(jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("=")))


def check_range(name: str, array: np.ndarray, dtype: np.dtype) -> None:
    """Raise `DataError` if a number in `array` is out of the range of `dtype`, a narrower one."""
    if dtype == array.dtype or array.dtype.kind not in "iuf":
        return
    limits: Any = np.finfo(dtype) if array.dtype.kind == "f" else np.iinfo(dtype)
    outside = np.isfinite(array) & ((array < limits.min) | (array > limits.max))
    if outside.any():
        raise DataError(
            f"{name} has the {array.dtype} {array[outside].flat[0]}; {dtype} ranges from "
            f"{limits.min} to {limits.max}: rescale it, or set jax_enable_x64"
        )


def refuse_keys(path: Path, leaf: Any) -> None:
    """Raise `DataError` if `leaf` holds random keys."""
    if is_random_key(leaf):
        raise DataError(
            f"batch{keystr(path)} holds {leaf.size} random keys, which are not numbers; split the "
            "key passed to the loss, or pass jax.random.key_data and wrap it in the loss"
        )


def _refuse_mask(path: Path, leaf: Any) -> None:
    hidden = int(np.ma.getmaskarray(leaf).sum())
    if hidden:
        raise DataError(
            f"batch{keystr(path)} is a masked array that hides {hidden} of {leaf.size} values; "
            "devices have no masks: fill them (x.filled(0)) and pass the mask as another array"
        )


def _of_torch(torch: Any, tensor: Any) -> Any:
    """Return a tensor as data: without its gradient, and in a dtype that NumPy reads."""
    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if not name.startswith(("bfloat", "float8")):
        return tensor
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)
    return np.asarray(bits).view(jax.numpy.dtype(name))


def _is_extended(dtype: np.dtype) -> bool:
    """Whether a dtype of kind V is one of `ml_dtypes`, and not bytes or fields."""
    return dtype.kind == "V" and bool(jax.numpy.issubdtype(dtype, np.number))

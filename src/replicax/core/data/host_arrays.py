"""Arrays of the user's data, from any library, as NumPy arrays."""

import sys
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr

from replicax.core.ground.leaves import is_random_key
from replicax.errors import DataError

Path = tuple[Any, ...]


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


def device_array(path: Path, leaf: Any, *, copy: bool) -> np.ndarray:
    """Return `leaf` as a NumPy array in the dtype that it has on a device, or raise `DataError`."""
    given = host_array(path, leaf)
    array, dtype = np.array(given, copy=True) if copy else given, device_dtype(path, given)
    if dtype == array.dtype:
        return array
    check_range(f"batch{keystr(path)}", array, dtype)
    with np.errstate(over="ignore"):
        return array.astype(dtype)


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

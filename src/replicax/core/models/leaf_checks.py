"""Checks of all arrays of a model, before they are placed on devices."""

import jax
import numpy as np

from replicax.core.data.host_arrays import check_range
from replicax.core.ground.leaves import PyTree, by_path
from replicax.core.ground.precision import is_narrow_float
from replicax.errors import ConfigError


def check_leaves(arrays: PyTree) -> None:
    """Raise `DataError` if a number of a 64-bit array on the host has no 32-bit value.

    As for a batch: 64-bit arrays become 32-bit ones unless `jax_enable_x64` is set.
    """
    for path, leaf in by_path(arrays).items():
        if isinstance(leaf, np.ndarray | np.generic):
            dtype = np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
            check_range(f"model{path}", np.asarray(leaf), dtype)


def check_trained(params: PyTree) -> None:
    """Raise `ConfigError` if a parameter to train has at most 8 bits."""
    for path, leaf in by_path(params).items():
        if is_narrow_float(leaf.dtype):
            raise ConfigError(
                f"model{path} is {leaf.dtype} and trains; its gradient, moments and updates would "
                "be rounded to that: freeze it (trainable=), or train it in bfloat16 or float32"
            )

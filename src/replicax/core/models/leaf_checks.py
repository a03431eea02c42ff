"""What is asked of all arrays of a model, before they are placed on devices."""

import jax
import numpy as np

from replicax.core.data.host_arrays import check_range
from replicax.core.ground.leaves import PyTree, by_path


def check_leaves(arrays: PyTree) -> None:
    """Raise `DataError` if a number of a 64-bit array on the host has no 32-bit value.

    As for a batch: 64-bit arrays become 32-bit ones unless `jax_enable_x64` is set.
    """
    for path, leaf in by_path(arrays).items():
        if isinstance(leaf, np.ndarray | np.generic):
            dtype = np.dtype(jax.dtypes.canonicalize_dtype(leaf.dtype))
            check_range(f"model{path}", np.asarray(leaf), dtype)

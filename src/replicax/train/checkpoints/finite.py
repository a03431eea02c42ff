"""Whether what is to be a checkpoint holds numbers: who resumes from NaN has nothing."""

from collections.abc import Collection, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.update import TrainState
from replicax.train.checkpoints.arrays import named
from replicax.train.checkpoints.manifest import ArrayEntry

_PARAMS = "params."
_BYTES_AT_ONCE = 2**24


def params_not_finite(state: TrainState) -> frozenset[str]:
    """Leaf names of the parameters that have an element which is not finite."""
    params = {
        name: leaf
        for name, leaf in named(state).items()
        if name.startswith(_PARAMS) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
    finite = jax.jit(lambda leaves: jax.tree.map(lambda leaf: jnp.isfinite(leaf).all(), leaves))
    return frozenset(name for name, all_finite in finite(params).items() if not bool(all_finite))


def first_not_finite(
    folder: Path, arrays: Mapping[str, ArrayEntry], but: Collection[str]
) -> str | None:
    """The name of a parameter in `folder` with an element that is not finite; None where all are.

    Args:
        folder: written by `replicax.train.checkpoints.arrays.begin_writing`.
        arrays: what is there.
        but: those that may be so: they were when the run began.
    """
    for name, entry in arrays.items():
        if not name.startswith(_PARAMS) or name in but or not entry.nbytes:
            continue
        dtype = np.dtype(entry.dtype)
        if not jnp.issubdtype(dtype, jnp.inexact):
            continue
        for chunk in (folder / name).glob("*"):  # none, where another process has written it
            if chunk.name[0] != "." and not _is_finite(chunk, dtype):
                return name
    return None


def _is_finite(chunk: Path, dtype: np.dtype) -> bool:
    elements = np.memmap(chunk, dtype, mode="r")
    step = max(1, _BYTES_AT_ONCE // dtype.itemsize)
    return all(
        np.isfinite(elements[start : start + step]).all() for start in range(0, len(elements), step)
    )

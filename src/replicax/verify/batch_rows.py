"""Rows of a batch: selecting them and reading their weights."""

from typing import Any

import jax
import numpy as np

from replicax.core.ground.leaves import PyTree
from replicax.errors import ConfigError

_WEIGHT_NAMES = ("mask", "masks", "weight", "weights", "sample_weight", "loss_mask")


def rows_of_batch(batch: PyTree) -> int:
    """Return the leading dimension shared by all arrays of a batch; scalars are ignored.

    Raises:
        ConfigError: the arrays disagree, or the batch has none.
    """
    counts = {
        jax.tree_util.keystr(path): leaf.shape[0]
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        if _has_rows(leaf)
    }
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{path or 'batch'} {count}" for path, count in counts.items())
        raise ConfigError(
            f"the arrays of the batch have row counts {listed or 'none'}; all must have the same "
            "leading dimension: pass the global batch, rows first"
        )
    return int(next(iter(counts.values())))


def take(batch: PyTree, indices: np.ndarray) -> PyTree:
    """Return the batch made of the rows at these indices."""
    return jax.tree.map(lambda leaf: leaf[indices] if _has_rows(leaf) else leaf, batch)


def shuffled(batch: PyTree, count: int) -> list[PyTree]:
    """Return `count` copies of the batch, each with its rows in a different order."""
    order = np.random.default_rng(0)
    return [take(batch, order.permutation(rows_of_batch(batch))) for _ in range(count)]


def find_weights(batch: PyTree, name: str | None) -> str | None:
    """Return the path of the leaf with the row weights, or None if there is none.

    `name` is the last key of its path, or its index in a tuple; None looks for a leaf named
    mask, weights or similar.

    Raises:
        ConfigError: no leaf has that name.
    """
    paths = jax.tree_util.tree_leaves_with_path(batch)
    ends = {jax.tree_util.keystr(path): last_name(path) for path, _ in paths}
    if name is None:
        return next((path for path, end in ends.items() if end.lower() in _WEIGHT_NAMES), None)
    found = next((path for path, end in ends.items() if name in (end, path)), None)
    if found is None:
        listed = ", ".join(end or "(the batch itself)" for end in ends.values())
        raise ConfigError(
            f"weights={name!r} names no array of the batch, which has {listed}: choose one of these"
        )
    return found


def with_weights(batch: PyTree, path: str, weights: np.ndarray) -> PyTree:
    """Return the batch with new weights, one value per row, in the old dtype and shape."""

    def replaced(where: Any, leaf: Any) -> Any:
        if jax.tree_util.keystr(where) != path:
            return leaf
        spread = weights.reshape(-1, *[1] * (leaf.ndim - 1))
        return np.broadcast_to(spread, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(replaced, batch)


def weights_of(batch: PyTree, path: str) -> np.ndarray:
    """Return the weight of each row, [rows]: the sum, if a row has several."""
    by_path = {
        jax.tree_util.keystr(where): leaf
        for where, leaf in jax.tree_util.tree_leaves_with_path(batch)
    }
    weights = np.asarray(by_path[path], np.float64)
    total: np.ndarray = weights.reshape(weights.shape[0], -1).sum(axis=1)
    return total


def last_name(path: Any) -> str:
    """Return the last key of a leaf's path: a dict key, field or index; empty for a lone leaf."""
    return jax.tree_util.keystr(path[-1:], simple=True)


def _has_rows(leaf: Any) -> bool:
    return getattr(leaf, "ndim", 0) > 0

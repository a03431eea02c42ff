"""The derivative of a loss in a direction, from two values of it."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax.core.ground.leaves import PyTree
from replicax.verify.difference import Leaves, leaves

_STEP = 2e-3
"""Length of the step to each side, relative to the parameters."""
_SHARE = 0.02
"""Bound on the error of the difference, as a share of the derivative."""
_UNITS = 16
"""The same in units of eps of the loss."""


def difference_in_direction(
    mean: Callable[[PyTree], Any], params: PyTree, gradient: Leaves, eps: float
) -> float:
    """Return by what share `gradient` differs from a central difference of `mean`, or 0.

    The direction is drawn, and weighs all leaves of the gradient alike. A difference counts if it
    is larger than what rounding of the two values, and the curvature between them, can explain.
    """
    numbers = np.random.default_rng(0)
    direction = {
        path: numbers.normal(size=leaf.shape) / (np.linalg.norm(leaf) or 1.0)
        for path, leaf in gradient.items()
    }
    before = leaves(params)
    lengths = (
        np.linalg.norm(each) / (np.linalg.norm(before[path]) or math.sqrt(each.size))
        for path, each in direction.items()
    )
    step = _STEP / max(lengths)

    def at(step: float) -> float:
        def moved(path: Any, leaf: Any) -> Any:
            return leaf + (step * direction[jax.tree_util.keystr(path)]).astype(leaf.dtype)

        return float(mean(jax.tree_util.tree_map_with_path(moved, params)))

    ahead, behind = at(step), at(-step)
    parts = {path: leaf * direction[path] for path, leaf in gradient.items()}
    scale = math.sqrt(sum(float(np.sum(np.abs(part) ** 2)) for part in parts.values()))
    found = sum(float(np.sum(part.real)) for part in parts.values())
    apart = abs(found - (ahead - behind) / (2 * step))
    bound = _SHARE * scale + _UNITS * eps * max(abs(ahead), abs(behind)) / step
    return 0.0 if apart <= bound else apart / scale if scale else math.inf

"""Two ways to train, compared leaf by leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def record_gradient() -> optax.GradientTransformation:
    """Keeps the newest gradient in its state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda gradient, _state, _params=None: (gradient, gradient),
    )


def in_float64(model: Any) -> Any:
    """Return a model with its floats widened."""

    def widened(leaf: Any) -> Any:
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, jnp.float64) if floating else leaf

    if not isinstance(model, nnx.Module):
        return jax.tree.map(widened, model)
    nnx.update(model, jax.tree.map(widened, nnx.state(model)))
    return model


def without_keys(extras: Any) -> list[np.ndarray]:
    """Return the leaves of a model's other arrays that are no random keys."""
    return [
        np.asarray(leaf)
        for leaf in jax.tree.leaves(extras)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]


def largest_difference(tree: Any, reference: Any) -> tuple[float, str]:
    """Over all leaves: the largest difference over the largest value, and where."""
    worst = (0.0, "")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), expected in zip(leaves, jax.tree.leaves(reference), strict=True):
        leaf, expected = np.asarray(leaf, np.float64), np.asarray(expected, np.float64)
        assert np.isfinite(leaf).all()
        scale = np.abs(expected).max() or 1.0
        worst = max(worst, (np.abs(leaf - expected).max() / scale, jax.tree_util.keystr(path)))
    return worst

"""A training that proves which rows it used: each step adds to the counts of its rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

FEATURES = 8
_BASE = 4


def seen_once_an_epoch(epochs: int) -> int:
    """Return the count of a row that each epoch has used once."""
    return sum(_BASE**epoch for epoch in range(epochs))


def loss(model: Any, batch: Any, key: Any) -> Any:
    """A regression on noisy inputs; the count of a row has the gradient 1 and the value 0."""
    x = batch["x"]
    if key is not None:
        x = x + 0.01 * jax.random.normal(key, x.shape)
    seen = model["seen"][batch["id"]]
    error = jnp.tanh(x @ model["in"]) @ model["out"] - batch["y"]
    return error**2 + seen - jax.lax.stop_gradient(seen), {"size": jnp.abs(error)}


def optimizer(steps_of_an_epoch: int) -> optax.GradientTransformation:
    """Return AdamW, and for the counts what adds 4 ** epoch for each use of a row."""
    return optax.partition(
        {"count": _on_leaf(_counting(steps_of_an_epoch)), "train": optax.adamw(1e-2)},
        {"in": "train", "out": "train", "seen": "count"},
    )


def _counting(steps_of_an_epoch: int) -> optax.GradientTransformation:
    """The gradient is the same for all rows that a batch has once, and 0 for the others.

    Divided by its least it is a whole number, exactly.
    """

    def update(gradient: jax.Array, count: jax.Array, params: Any = None) -> Any:
        least = jnp.min(jnp.where(gradient > 0, gradient, jnp.inf))
        return gradient / least * jnp.float32(_BASE) ** (count // steps_of_an_epoch), count + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


def _on_leaf(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply the transformation to a tree that has one leaf."""

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        (gradient,), tree = jax.tree.flatten(gradients)
        gradient, state = transformation.update(gradient, state)
        return tree.unflatten([gradient]), state

    return optax.GradientTransformation(transformation.init, update)


def model(counted: int) -> dict[str, np.ndarray]:
    """Return the initial model for a source of `counted` rows."""
    numbers = np.random.default_rng(1)
    return {
        "in": numbers.normal(size=(FEATURES, 32)).astype(np.float32),
        "out": numbers.normal(size=32).astype(np.float32),
        "seen": np.zeros(counted, np.float32),
    }


def rows(count: int, seed: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(seed)
    return {
        "id": np.arange(count, dtype=np.int32),
        "x": numbers.normal(size=(count, FEATURES)).astype(np.float32),
        "y": numbers.normal(size=count).astype(np.float32),
    }

"""`rx.fit` of a line: a step that compiles fast, and any number of rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from support.settings import grouped

import replicax as rx


def loss(model: Any, batch: Any, key: Any) -> Any:
    """Squared error of each row, with a metric."""
    error = model["w"] * batch["x"] + model["b"] - batch["y"]
    return error**2, {"error": jnp.abs(error)}


def line(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return rows of the line to fit."""
    x = np.random.default_rng(seed).normal(size=rows).astype(np.float32)
    return {"x": x, "y": 2 * x + 1}


def model() -> dict[str, jax.Array]:
    """A slope and an intercept, both 0."""
    return {"w": jnp.float32(0), "b": jnp.float32(0)}


def fit(dp: rx.DataParallel, source: Any = None, **settings: Any) -> rx.types.Fit:
    """Fit a new state, by default to a line of 40 rows."""
    source = line(40) if source is None else source
    settings = grouped({"batch_size": 16, "progress": False, **settings})
    return rx.fit(dp, dp.init(model()), source, **settings)

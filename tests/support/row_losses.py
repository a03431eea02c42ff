"""A small regression for losses whose rows meet or stay apart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

Loss = Callable[[Any, Any, Any], Any]
ROWS = 16
NUMBERS = np.random.default_rng(0)
MODEL = {"w": NUMBERS.normal(size=(5, 3)).astype(np.float32)}
DATA = {
    "x": NUMBERS.normal(size=(ROWS, 5)).astype(np.float32),
    "y": NUMBERS.normal(size=(ROWS, 3)).astype(np.float32),
    "label": NUMBERS.integers(0, 3, ROWS).astype(np.int32),
}
stop = jax.lax.stop_gradient


def output(model: Any, batch: Any) -> Any:
    return batch["x"] @ model["w"]


def error(model: Any, batch: Any) -> Any:
    return jnp.sum((output(model, batch) - batch["y"]) ** 2, axis=1)


def stepped(loss: Loss, **settings: Any) -> Any:
    dp = rx.DataParallel(loss, optax.sgd(0.1), **settings)
    return dp.step(dp.init(MODEL), DATA)[0].params

"""A small regression for losses whose rows meet or stay apart."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.training import normals, parallel, train

Loss = Callable[[Any, Any, Any], Any]
ROWS = 16
draw = normals(0)
MODEL = {"w": draw(5, 3)}
LABELS = np.random.default_rng(1).integers(0, 3, ROWS).astype(np.int32)
DATA = {"x": draw(ROWS, 5), "y": draw(ROWS, 3), "label": LABELS}
stop = jax.lax.stop_gradient


def output(model: Any, batch: Any) -> Any:
    return batch["x"] @ model["w"]


def error(model: Any, batch: Any) -> Any:
    return jnp.sum((output(model, batch) - batch["y"]) ** 2, axis=1)


def stepped(loss: Loss, **settings: Any) -> Any:
    """Return the parameters after a step, on the first 4 devices."""
    return train(parallel(loss, optax.sgd(0.1), **settings), MODEL, [DATA])[0].params

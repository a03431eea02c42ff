"""A small model and its data for tests of mistakes."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from support import figures
from support.training import parallel

from replicax.errors import ReplicaxError

MODEL = {"w": jnp.ones(3)}
WIDE = {"w": jnp.arange(48.0).reshape(3, 16)}
ROWS = {"x": np.arange(24, dtype=np.float32).reshape(8, 3) / 24}
MODES = ("single", "jit", "shard_map", "pmap", "exact")
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"]) ** 2


def whole(*arguments: Any) -> Any:
    return loss(*arguments).mean()


def wide(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"]).sum(1)


def make(function: Any = loss, optimizer: Any = ADAM, **options: Any) -> Any:
    return parallel(function, optimizer, **options)


def init(model: Any = MODEL, optimizer: Any = ADAM) -> Any:
    return make(optimizer=optimizer).init(model)


def step(function: Any = loss, rows: Any = ROWS, times: int = 1, **options: Any) -> Any:
    dp = make(function, **options)
    state = dp.init(MODEL)
    for _ in range(times):
        state, metrics = dp.step(state, rows)
    return metrics


def step_and_evaluate(dp: Any) -> tuple[Callable[..., Any], ...]:
    return dp.step, lambda state, batch: dp.evaluate(state, [batch])


def refused(kind: type[ReplicaxError], call: Callable[[], Any], *words: str) -> str:
    """Check that `call` is refused in one line with these `words`, and return the line."""
    with figures.refused(kind, *words) as caught:
        call()
    return str(caught.value)

"""One `jit` step, to see what it enters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import replicax as rx


def loss(model: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ model["w"] - batch["y"]) ** 2


def warm_step() -> Callable[[], Any]:
    """Return a function that traces the step, as a first call does, and runs it once more."""
    dp = rx.DataParallel(loss, optax.adam(1e-3), mesh=rx.make_mesh(devices=jax.devices()[:1]))
    state = dp.init({"w": jnp.ones(3)})
    batch = next(iter(dp.feed({"x": jnp.ones((8, 3)), "y": jnp.ones(8)}, batch_size=8)))
    traced = jax.eval_shape(lambda *arrays: arrays, state, batch)
    for _ in range(2):
        state, _ = dp.step(state, batch)
    program = dp.program(state)

    def step() -> None:
        jax.clear_caches()
        program.step.trace(*traced)
        dp.step(state, batch)

    return step

"""A small custom step with its data."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import training
from support.tiers import only

import replicax as rx

ROWS, BATCH = 52, 32
PLACES = [
    (mode, devices, accumulate)
    for mode in ("jit", "shard_map", "pmap", "exact", "single")
    for devices in ((1,) if mode == "single" else (1, 2, 4))
    for accumulate in ((1,) if mode == "exact" else (1, 2))
]
in_micro_batches = pytest.mark.parametrize(
    ("mode", "devices", "accumulate"),
    only([("jit", 4, 2), ("shard_map", 4, 1), ("exact", 2, 1)], PLACES),
)
optimizer = optax.adam(1e-2)
State = dict[str, Any]


def rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :1] * 2).astype(np.float32)}


def model() -> dict[str, jax.Array]:
    random = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape) / 2, jnp.float32)  # noqa: E731
    return {"w": draw(4, 8), "v": draw(8, 1)}


def state() -> State:
    return {"model": model(), "moments": optimizer.init(model()), "done": jnp.int32(0)}


def loss(model: Any, batch: Any, key: Any) -> Any:
    error = jnp.tanh(batch["x"] @ model["w"]) @ model["v"] - batch["y"]
    return jnp.sum(error**2, -1), {"size": jnp.abs(error[:, 0])}


def step(state: State, batch: Any, key: Any) -> tuple[State, Any]:
    means, gradient = rx.value_and_grad(loss)(state["model"], batch, key)
    updates, moments = optimizer.update(gradient, state["moments"], state["model"])
    trained = optax.apply_updates(state["model"], updates)
    after = {"model": trained, "moments": moments, "done": state["done"] + 1}
    return after, {**means, "mean": rx.mean(batch["y"][:, 0])}


def of_state(state: State, batch: Any, key: Any) -> Any:
    return loss(state["model"], batch, key)


def parallel(
    step: Any = step, mode: str = "shard_map", devices: int = 4, **settings: Any
) -> rx.DataParallel:
    return training.parallel(step=step, mode=mode, devices=devices, **settings)


def trained(dp: rx.DataParallel, begin: Any, batch_size: int = BATCH) -> tuple[Any, Any]:
    return training.train(dp, begin, dp.feed(rows(), batch_size))

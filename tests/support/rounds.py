"""Small steps with rounds, on simulated devices that are islands."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

RNG = np.random.default_rng(0)
ROWS, BATCH, WIDTH = 64, 16, 8
SOURCE = {
    "x": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32),
    "y": RNG.normal(size=(ROWS, WIDTH)).astype(np.float32),
}
MODEL = {
    "a": jnp.asarray(RNG.normal(size=(WIDTH, WIDTH)), jnp.float32),
    "b": jnp.asarray(RNG.normal(size=(WIDTH,)), jnp.float32),
    "c": jnp.asarray(RNG.normal(size=(WIDTH, WIDTH)), jnp.float32),
}
SGD, PLAIN = optax.sgd(0.1), optax.sgd(1.0)


def squared(model: Any, batch: Any, key: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ model["a"] + model["b"])
    return ((hidden @ model["c"] - batch["y"]) ** 2).mean(-1)


def noisy(model: Any, batch: Any, key: Any) -> Any:
    if key is None:
        return squared(model, batch, key)
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return squared(model, {**batch, "x": batch["x"] * kept}, key)


def own_step(state: Any, batch: Any, key: Any) -> Any:
    """Take a step of SGD, as `SGD` does."""
    metrics, found = rx.value_and_grad(squared)(state, batch, key)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, found), metrics


def mesh_of(devices: int) -> jax.sharding.Mesh:
    return rx.make_mesh(devices=jax.devices()[:devices])


def on(devices: int, rounds: rx.Rounds | None = None, **options: Any) -> rx.DataParallel:
    """Return a step on replicas, each of which is an island if it has rounds along the axis."""
    given = {"loss": squared, "optimizer": SGD, "mode": "shard_map", **options}
    if "step" in given:
        given = {name: value for name, value in given.items() if name != "optimizer"}
    return rx.DataParallel(mesh=mesh_of(devices), rounds=rounds, **given)


def over(every: int, **options: Any) -> rx.Rounds:
    """Return islands along the axis of the replicas, with a plain outer step by default."""
    return rx.Rounds(every, axis="data", **{"outer": PLAIN, **options})


def train(
    dp: rx.DataParallel, model: Any = MODEL, source: Any = SOURCE, steps: int = 8, size: int = BATCH
) -> tuple[Any, list[dict[str, float]]]:
    """Return the state after `steps` on batches in order, and the metrics of each."""
    state, told = dp.init(model), list[dict[str, float]]()
    epoch = 0
    while True:
        for batch in dp.feed(source, size, epoch=epoch):
            if len(told) == steps:
                return state, told
            state, metrics = dp.step(state, batch)
            told.append({name: float(value) for name, value in metrics.items()})
        epoch += 1


def assert_close(one: Any, other: Any, relative: float = 1e-6) -> None:
    """Compare trees of parameters, relative to the largest of each."""

    def check(a: Any, b: Any) -> None:
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=relative, atol=relative * np.abs(b).max(initial=0))

    jax.tree.map(check, one, other)


def assert_same(one: Any, other: Any) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other
    )

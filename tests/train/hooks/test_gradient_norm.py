"""`GradientNorm`: the norm of the global mean gradient, however the step is mapped."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import EXHAUSTIVE, only

import replicax as rx
from replicax.core.step.loss_scale import value_of
from replicax.errors import ConfigError
from replicax.train.guarded import guarded
from replicax.train.hooks.figures import with_gradient_norm

ROWS = 40
KEPT: list[dict[str, Any]] = [
    {"mode": "jit", "layout": "fsdp", "accumulate": 2},
    {"mode": "shard_map", "trainable": "'w'"},
    {"mode": "exact", "micro_shards": 8},
    {"mode": "shard_map", "layout": "fsdp", "accumulate": 2},
]
CASES: list[dict[str, Any]] = [
    {"mode": "single"},
    {"mode": "jit"},
    {"mode": "jit", "layout": "zero1"},
    {"mode": "jit", "layout": "fsdp", "trainable": "'w'"},
    {"mode": "shard_map", "accumulate": 2},
    {"mode": "pmap"},
    {"mode": "jit", "precision": "bfloat16"},
    {"mode": "shard_map", "layout": "zero1"},
    {"mode": "exact", "layout": "zero1"},
    *KEPT,
]


def loss(model: Any, batch: Any, key: Any) -> Any:
    error = batch["x"] @ model["w"] + model["b"] - batch["y"]
    return rx.Weighted(jnp.sum(error**2, axis=-1), batch["weight"])


def model() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    return {"w": jnp.asarray(random.normal(size=(8, 8)), jnp.float32), "b": jnp.ones(8)}


def rows() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    x = random.normal(size=(ROWS, 8)).astype(np.float32)
    return {"x": x, "y": 2 * x, "weight": random.uniform(size=ROWS).astype(np.float32)}


def by_hand(trainable: str | None) -> float:
    def mean(model: Any) -> jax.Array:
        values = loss(model, rows(), None)
        return jnp.sum(values.values * values.weights) / jnp.sum(values.weights)

    gradient = jax.grad(mean)(model())
    return float(optax.tree.norm(gradient["w"] if trainable else gradient))


def first_norm(**settings: Any) -> np.ndarray:
    dp = rx.DataParallel(loss, optax.adam(0.1), **settings)
    state = dp.init(model())
    dp = guarded(dp, state, (with_gradient_norm,))
    (batch,) = dp.feed(rows(), batch_size=48)  # of which 8 are padding
    _, metrics = dp.step(state, batch)
    return np.asarray(value_of(metrics["gradient_norm"]))


@pytest.mark.parametrize("settings", only(KEPT, CASES), ids=str)
def test_it_is_the_norm_of_the_global_mean_gradient(settings: dict[str, Any]) -> None:
    near = 2e-2 if "precision" in settings else 1e-6
    expected = by_hand(settings.get("trainable"))
    np.testing.assert_allclose(first_norm(**settings), expected, rtol=near)


@EXHAUSTIVE
@pytest.mark.usefixtures("optimized")
def test_in_mode_exact_its_bits_are_those_of_any_number_of_devices() -> None:
    meshes = [rx.make_mesh(devices=jax.devices()[:count]) for count in (1, 8)]
    norms = [first_norm(mode="exact", mesh=mesh) for mesh in meshes]
    assert norms[0].tobytes() == norms[1].tobytes()


def test_a_loss_that_has_such_a_metric_is_refused() -> None:
    def told(model: Any, batch: Any, key: Any) -> Any:
        value = loss(model, batch, key)
        return value, {"gradient_norm": value}

    dp = rx.DataParallel(told, optax.sgd(0.1))
    source = rows()
    with pytest.raises(ConfigError, match="gradient_norm"):
        rx.fit(
            dp,
            dp.init(model()),
            source,
            batch_size=40,
            steps=1,
            hooks=[rx.hooks.GradientNorm()],
            progress=False,
        )


def test_a_custom_step_returns_it_itself() -> None:
    def step(state: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(loss)(state, batch, key)
        return jax.tree.map(lambda leaf, of: leaf - 0.1 * of, state, gradient), means

    dp = rx.DataParallel(step=step)
    with pytest.raises(ConfigError, match=r"optax\.tree\.norm"):
        rx.fit(
            dp,
            dp.init(model()),
            rows(),
            batch_size=40,
            steps=1,
            hooks=[rx.hooks.GradientNorm()],
            progress=False,
        )

"""Backward passes that are not linear in their cotangent see that of `jnp.mean`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only
from support.training import parallel

import replicax as rx
from replicax.core.jaxprs.row_inner import calls_not_linear

RNG = np.random.default_rng(0)
ROWS = {
    "x": RNG.normal(size=(16, 2, 3)).astype(np.float32),
    "y": RNG.normal(size=(16, 2)).astype(np.float32),
}
W = jnp.asarray(RNG.normal(size=3), jnp.float32)
BATCHES = {"whole": ROWS, "short": {name: rows[:11] for name, rows in ROWS.items()}}
Change = Callable[[jax.Array], jax.Array]


def backward(change: Change, value: jax.Array) -> jax.Array:
    """Return `value`, whose cotangent is changed."""

    @jax.custom_vjp
    def same(value: jax.Array) -> jax.Array:
        return value

    same.defvjp(lambda value: (value, None), lambda _, by: (change(by),))
    return same(value)


def clipped(w: jax.Array, batch: Any, key: Any) -> jax.Array:
    """Return errors `[rows, 2]`, each with a gradient that is clipped."""
    errors = batch["x"] @ w - batch["y"]
    return backward(lambda by: jnp.clip(by, -0.02, 0.02), errors) ** 2


def normed(w: jax.Array, batch: Any, key: Any) -> jax.Array:
    """Return a loss `[rows]` whose gradients by each row are of length 1."""

    def unit(by: jax.Array) -> jax.Array:
        return by / (jnp.linalg.norm(by, axis=(1, 2), keepdims=True) + 1e-3)

    return jnp.sum(backward(unit, batch["x"] * w).sum(2) ** 2, axis=1)


each_loss = optax.softmax_cross_entropy_with_integer_labels


@jax.custom_vjp
def tiled_loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
    return each_loss(x @ w, labels)


def of_tiles(kept: Any, by: jax.Array) -> Any:
    x, w, labels = kept
    return (*jax.vjp(lambda x, w: each_loss(x @ w, labels), x, w)[1](by), None)


tiled_loss.defvjp(lambda *given: (tiled_loss(*given), given), of_tiles)


def tiled(w: jax.Array, batch: Any, key: Any) -> jax.Array:
    """Return a loss `[rows]` whose backward pass no trace shows to be 0 for padding."""
    labels = jnp.argmax(batch["x"][:, 0], axis=1)
    return tiled_loss(jnp.tanh(batch["x"][:, 0] * w), jnp.outer(w, w), labels)


def of_parameters(w: jax.Array, batch: Any, key: Any) -> jax.Array:
    return (batch["x"] @ backward(lambda by: jnp.clip(by, -0.1, 0.1), w) - batch["y"]) ** 2


def plain(loss: Any, batch: Any) -> Any:
    return W - 0.1 * jax.grad(lambda w: jnp.mean(loss(w, batch, None)))(W)


PLACES = [("single", 1, 1), ("jit", 2, 1), ("shard_map", 2, 2), ("pmap", 2, 1), ("exact", 2, 1)]


@pytest.mark.parametrize("rows", only(["short"], BATCHES))
@pytest.mark.parametrize(("mode", "devices", "accumulate"), only([PLACES[2]], PLACES))
@pytest.mark.parametrize("loss", [clipped, normed, tiled])
def test_by_row_it_is_the_same_everywhere(
    loss: Any, mode: str, devices: int, accumulate: int, rows: str
) -> None:
    dp = parallel(loss, optax.sgd(0.1), mode=mode, devices=devices, accumulate=accumulate)
    after, _ = dp.step(dp.init(W), BATCHES[rows])
    np.testing.assert_allclose(dp.model(after), plain(loss, BATCHES[rows]), atol=1e-6)


def test_of_parameters_it_is_right_or_refused() -> None:
    dp = parallel(of_parameters, optax.sgd(0.1), mode="jit", devices=2)
    after, _ = dp.step(dp.init(W), ROWS)
    np.testing.assert_allclose(dp.model(after), plain(of_parameters, ROWS), atol=1e-6)
    for mode, accumulate in (("shard_map", 1), ("jit", 2), ("exact", 1)):
        dp = parallel(of_parameters, optax.sgd(0.1), mode=mode, devices=2, accumulate=accumulate)
        state = dp.init(W)
        with pytest.raises(rx.errors.LossError):
            dp.step(state, ROWS)


def weighted(w: jax.Array, batch: Any, key: Any) -> rx.Weighted:
    return rx.Weighted(clipped(w, batch, key), batch["y"] > 0)


def divided(w: jax.Array, batch: Any, key: Any) -> jax.Array:
    counts = jnp.float32(batch["y"] > 0)
    return clipped(w, batch, key) * counts / jnp.mean(rx.gather(counts))


def test_a_weighted_mean_divides_before_it() -> None:
    dp = parallel(weighted, optax.sgd(0.1), mode="single", devices=1)
    with pytest.raises(
        rx.errors.LossError, match=r"custom_vjp at test_cotangent.py:\d+ .* rx.gather"
    ):
        dp.step(dp.init(W), ROWS)
    dp = parallel(divided, optax.sgd(0.1), mode="shard_map", devices=2)
    after, _ = dp.step(dp.init(W), ROWS)
    np.testing.assert_allclose(dp.model(after), plain(divided, ROWS), atol=1e-6)


LINEAR: list[Change] = [
    lambda by: -0.3 * by,
    lambda by: by - jnp.mean(by),
    lambda by: jnp.where(W > 0, by, 0),
    lambda by: by.astype(jnp.float8_e5m2).astype(jnp.float32),
]
CURVED: list[Change] = [
    lambda by: jnp.clip(by, -20, 20),
    lambda by: by / jnp.linalg.norm(by),
    lambda by: jnp.where(jnp.abs(by) > 0.1, by, 0),
    lambda by: by + 0.01,
    lambda by: W,
]


@pytest.mark.parametrize("change", [*LINEAR, *CURVED])
def test_backward_passes_that_are_not_linear_are_found(change: Change) -> None:
    jaxpr = jax.make_jaxpr(jax.jit(lambda w: backward(change, w) ** 2))(W)
    assert len(list(calls_not_linear(jaxpr.jaxpr))) == (change in CURVED)


@pytest.mark.parametrize(("mode", "devices", "accumulate"), only([PLACES[2]], PLACES))
def test_a_custom_step_has_it_too(mode: str, devices: int, accumulate: int) -> None:
    def step(w: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(clipped)(w, batch, key)
        return w - 0.1 * gradient, means

    dp = parallel(step=step, mode=mode, devices=devices, accumulate=accumulate)
    after, _ = dp.step(dp.init(W), BATCHES["short"])
    np.testing.assert_allclose(dp.model(after), plain(clipped, BATCHES["short"]), atol=1e-6)


def test_a_set_has_it_too_or_is_refused() -> None:
    def step(w: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(clipped)(w, batch["others"], key)
        return w - 0.1 * gradient, {**means, "x": rx.mean(batch["x"][:, 0, 0])}

    others = {name: rows[11:] for name, rows in ROWS.items()}
    batch = {**BATCHES["short"], "others": rx.ExtraRows(others)}
    dp = parallel(step=step, mode="single")
    after, _ = dp.step(dp.init(W), batch)
    np.testing.assert_allclose(dp.model(after), plain(clipped, others), atol=1e-6)
    dp = parallel(step=step, mode="shard_map", devices=2)
    state = dp.init(W)
    with pytest.raises(
        rx.errors.LossError
    ):  # not shown: rows of a set are constants beside the batch
        dp.step(state, batch)


def test_a_gradient_that_is_a_new_value_is_that_value() -> None:
    @jax.custom_vjp
    def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x / scale

    scaled.defvjp(lambda x, s: (x / s, (x, s)), lambda kept, by: (by / kept[1], kept[0].max()))

    def step(state: Any, batch: Any, key: Any) -> Any:
        def loss(state: Any, batch: Any, key: Any) -> jax.Array:
            return (scaled(batch["x"], state["scale"]) @ state["w"] - batch["y"]) ** 2

        means, gradient = rx.value_and_grad(loss)(state, batch, key)
        return {"w": state["w"] - 0.1 * gradient["w"], "scale": gradient["scale"]}, means

    dp = parallel(step=step, mode="jit", devices=2)
    after, _ = dp.step(dp.init({"w": W, "scale": jnp.float32(1)}), ROWS)
    np.testing.assert_allclose(dp.model(after)["scale"], ROWS["x"].max(), rtol=1e-6)

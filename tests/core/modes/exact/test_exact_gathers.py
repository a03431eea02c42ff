"""A loss that gathers rows in mode `exact`: as on one device, with the same bits on any number."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from support.tiers import only
from support.training import assert_near, epochs, normals, parallel, train

import replicax as rx
from replicax.train.files.fingerprint import sha256

ROWS, BATCH = 52, 32  # the last batch has padding
normal = normals(0)
SOURCE = {"x": normal(ROWS, 12), "y": normal(ROWS, 12)}
MODEL = {"x": normal(12, 6) / 3, "y": normal(12, 6) / 3, "h": normal(6, 6)}


def _towers(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    return jnp.tanh(batch["x"] @ model["x"]), jnp.tanh(batch["y"] @ model["y"])


def contrastive(model: Any, batch: Any, key: Any) -> Any:
    x, y = _towers(model, batch)
    others, real = rx.gather((y, rx.row_weights(y)))
    return jax.nn.logsumexp(x @ others.T, axis=1, b=real) - jnp.sum(x * y, 1)


def recomputed(model: Any, batch: Any, key: Any) -> Any:
    real = rx.row_weights(batch["x"])

    @jax.checkpoint
    @jax.jit
    def values(model: Any, batch: Any) -> Any:
        x, y = _towers(model, batch)
        others, counts = rx.gather((y, real))
        return jax.nn.logsumexp(x @ others.T, axis=1, b=counts) - jnp.sum(x * y, 1)

    return values(model, batch)


def layers(model: Any, batch: Any, key: Any) -> Any:
    """Centered in every turn of a scan."""
    real = rx.row_weights(batch["x"])

    def turn(hidden: jax.Array, _: Any) -> tuple[jax.Array, None]:
        hidden = jnp.tanh(hidden @ model["h"])
        every, counts = rx.gather((hidden, real))
        return hidden - (counts @ every / jnp.sum(counts)).astype(hidden.dtype), None

    hidden, _ = lax.scan(turn, batch["x"] @ model["x"], None, length=3)
    return jnp.sum((hidden - batch["y"][:, :6]) ** 2, -1)


def penalised(model: Any, batch: Any, key: Any) -> Any:
    """By a gradient through the gathered rows, which is differentiated again."""
    real = rx.row_weights(batch["x"])

    def of_rows(x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ model["x"])
        every, counts = rx.gather((hidden, real))
        centred = jnp.tanh(hidden @ model["h"] - counts @ every / jnp.sum(counts))
        return jnp.sum(real[:, None] * centred)

    return jnp.sum(jax.grad(of_rows)(batch["x"]) ** 2, -1)


LOSSES: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (contrastive, recomputed, layers, penalised)
}


def trained(name: str, mode: str, devices: int, **options: Any) -> tuple[Any, dict[str, float]]:
    """Return the state after two epochs, and its evaluation."""
    dp = parallel(LOSSES[name], optax.adam(1e-2), mode=mode, devices=devices, **options)
    state, _ = train(dp, MODEL, epochs(dp, SOURCE, BATCH, 2, shuffle=True))
    return state, dp.evaluate(state, dp.feed(SOURCE, BATCH))


@pytest.mark.parametrize("name", only(["contrastive"], LOSSES))
def test_it_is_the_loss_of_one_device(name: str) -> None:
    state, evaluated = trained(name, "exact", 2)
    wanted, expected = trained(name, "single", 1)
    assert evaluated["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert_near(state.params, wanted.params, rtol=1e-4)


SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "zero1": {"layout": "zero1"},
    "reduction": {"reduction": "bfloat16"},
    "precision": {"precision": "bfloat16"},
}
QUICK = [("contrastive", "")]


@pytest.mark.promise("exact.gathered-rows")
@pytest.mark.parametrize(("name", "settings"), only(QUICK, itertools.product(LOSSES, SETTINGS)))
def test_the_same_bits(name: str, settings: str) -> None:
    options = SETTINGS[settings]
    state, evaluated = trained(name, "exact", 1, **options)
    for devices in (2, 8):
        found, other = trained(name, "exact", devices, **options)
        assert (sha256(found), other) == (sha256(state), evaluated)

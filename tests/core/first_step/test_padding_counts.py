"""A loss that calls `rx.row_weights` is not believed for that: padding that counts is found."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiers import only
from support.training import parallel

import replicax as rx

ROWS = 13
_random = np.random.default_rng(0)
W = jnp.asarray(_random.normal(size=3), jnp.float32)
BATCH = {
    "x": _random.normal(size=(ROWS, 3)).astype(np.float32),
    "y": np.abs(_random.normal(size=ROWS)).astype(np.float32) + 0.5,
}


def of_batch(term: Any) -> Any:
    """Return a loss that adds `term` of all rows and their weights to each row."""

    def loss(w: Any, batch: Any, key: Any) -> Any:
        h = batch["x"] @ w
        every = rx.gather((h, batch["y"], rx.row_weights(h)))
        return (h - batch["y"]) ** 2 + term(*every)

    return loss


def largest(h: Any, y: Any, real: Any) -> Any:
    """The right number while some row is positive, as all are in the first batch."""
    return jnp.max(y * real)


def chosen(h: Any, y: Any, real: Any) -> Any:
    """A choice among real rows, with the gradient of a softmax over all: equal values."""
    hard = jax.nn.one_hot(jnp.argmax(jnp.where(real > 0, h, -jnp.inf)), len(h))
    soft = jax.nn.softmax(h)
    return jnp.sum((soft + jax.lax.stop_gradient(hard - soft)) * y)


def beside_a_constant(h: Any, y: Any, real: Any) -> Any:
    return 5.5e4 + 0.002 * jnp.sum(jnp.sort(h)) + 0 * jnp.sum(real)


def apart(h: Any, y: Any, real: Any) -> Any:
    return jax.nn.logsumexp(h, b=real) + jnp.max(jnp.abs(h) * real)


def narrow(w: Any, batch: Any, key: Any) -> Any:
    """A mean in bfloat16 of the real rows, and a small one of all."""
    h, real = batch["x"] @ w, rx.row_weights(batch["y"])
    values = ((h - batch["y"]) ** 2).astype(jnp.bfloat16) * real.astype(jnp.bfloat16)
    return jnp.float32(jnp.sum(values)) / jnp.sum(real) + 0.002 * jnp.mean(jnp.tanh(h))


def saturated(h: Any, y: Any, real: Any) -> Any:
    """The same number for all but small rows."""
    return jnp.tanh(5 * jnp.cumsum(jnp.abs(h))[-1]) + 0 * jnp.sum(real)


def by_their_number(w: Any, batch: Any, key: Any) -> Any:
    return (batch["x"] @ w - batch["y"]) ** 2 / len(rx.gather(batch["y"]))


@jax.custom_vjp
def leaking(h: Any) -> Any:
    return h


leaking.defvjp(lambda h: (h, None), lambda _, by: (by + 0.01,))


def backward(w: Any, batch: Any, key: Any) -> Any:
    """A backward pass that is not 0 for padding."""
    return (leaking(batch["x"] @ w) - batch["y"]) ** 2


COUNT = {
    "saturated": of_batch(saturated),
    "number": by_their_number,
    "backward": backward,
    "largest": of_batch(largest),
    "chosen": of_batch(chosen),
    "narrow": narrow,
    "constant": of_batch(beside_a_constant),
}


@pytest.mark.parametrize("name", only(["largest", "saturated", "number", "backward"], COUNT))
def test_padding_that_counts_is_refused(name: str) -> None:
    dp = parallel(COUNT[name], optax.sgd(0.1), mode="jit", devices=2)
    with pytest.raises(rx.errors.LossError, match=r"3 of 16 rows"):
        dp.step(dp.init(W), next(iter(dp.feed(BATCH, 16))))


def test_padding_left_out_is_that_of_one_device() -> None:
    dp = parallel(of_batch(apart), optax.sgd(0.1), mode="jit", devices=2)
    state, metrics = dp.step(dp.init(W), next(iter(dp.feed(BATCH, 16))))
    value, slope = jax.value_and_grad(lambda w: jnp.mean(of_batch(apart)(w, BATCH, None)))(W)
    assert float(metrics["loss"]) == pytest.approx(float(value), rel=1e-6)
    np.testing.assert_allclose(dp.model(state), W - 0.1 * slope, rtol=1e-5)


def test_weights_of_the_loss_may_be_of_gathered_rows() -> None:
    def hardest(w: Any, batch: Any, key: Any) -> Any:
        values = (batch["x"] @ w - batch["y"]) ** 2
        every, real = rx.gather((values, rx.row_weights(values)))
        least = jnp.sum(every * real) / jnp.sum(real)
        return rx.Weighted(values, jnp.float32(values >= jax.lax.stop_gradient(least)))

    dp = parallel(hardest, optax.sgd(0.1), mode="jit", devices=2)
    _, metrics = dp.step(dp.init(W), next(iter(dp.feed(BATCH, 16))))
    found = hardest(W, BATCH, None)
    assert float(metrics["loss"]) == pytest.approx(
        float(np.average(found.values, weights=found.weights)), rel=1e-6
    )

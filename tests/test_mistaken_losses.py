"""Losses that cannot be trained are refused in one line; similar correct ones train."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.mistakes import MODEL, MODES, ROWS, SGD, loss, make, refused, step, step_and_evaluate
from support.tiers import exhaustive

from replicax.errors import ConfigError, LossError


def two(model, batch) -> Any:
    return loss(model, batch, None)


@functools.wraps(two)
def wrapped(*arguments: Any) -> Any:
    return two(*arguments[:2])


class Loss:
    """A callable with settings."""

    def __call__(self, model: Any, batch: Any, key: Any, scale: float = 1.0) -> Any:
        return scale * loss(model, batch, key)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (two, ["(model, batch)", "3 arguments"]),
        (lambda batch: batch, ["(batch)", "3 arguments"]),
        (lambda model, batch, key, state: batch, ["(model, batch, key, state)", "3 arguments"]),
        (lambda model, batch, *, key: batch, ["key", "3 arguments"]),
        (jax.jit(two), ["(model, batch)", "3 arguments"]),
        (SGD, ["GradientTransformation"]),
        ("mse", ["str"]),
        (None, ["NoneType"]),
    ],
)
def test_a_loss_that_cannot_be_called_is_refused_by_the_constructor(
    function: Any, words: list[str]
) -> None:
    refused(ConfigError, lambda: make(function), *words, "loss(model, batch, key)")


ZERO = {
    "ints": lambda *a: (loss(*a) * 9).astype(int).mean() + 0.0,
    "argmax": lambda m, b, k: jnp.argmax(b["x"] * m["w"], axis=1).astype(float),
    "comparison": lambda *a: jnp.where(loss(*a) > 0.5, 1.0, 0.0),
    "constant": lambda *a: jax.lax.stop_gradient(loss(*a)),
    "round": lambda *a: jnp.round(loss(*a)),
    "no parameter": lambda m, b, k: b["x"].sum(1),
    "scan": lambda m, b, k: jax.lax.scan(lambda c, x: (c, jnp.sign(x @ m["w"])), 0.0, b["x"])[1],
}
TRAINS = {
    # with a gradient somewhere
    "scan": lambda m, b, k: jax.lax.scan(lambda c, x: (c, x @ m["w"]), 0.0, b["x"])[1],
    "relu": lambda *a: jax.nn.relu(loss(*a)),
    "straight through": lambda *a: loss(*a) + jax.lax.stop_gradient(jnp.round(loss(*a)) - loss(*a)),
    "drawn": lambda m, b, k: jnp.abs(jax.random.normal(k, (8,))) * m["w"][0],
    "penalty": lambda m, b, k: jnp.full(8, (m["w"] ** 2).sum()),
    "cond": lambda m, b, k: jax.lax.cond(
        b["x"][0, 0] > 0, lambda: b["x"] @ m["w"], lambda: b["x"][:, 0]
    ),
    # of three arguments
    "object": Loss(),
    "method": Loss().__call__,
    "default": lambda model, batch, key=None: loss(model, batch, key),
    "arguments": lambda *arguments: loss(*arguments),
    "keyword": lambda model, *rest, scale=2.0: scale * loss(model, *rest),
    "partial": functools.partial(lambda scale, m, b, k: scale * loss(m, b, k), 2.0),
    "partial keyword": functools.partial(lambda m, b, k, scale: scale * loss(m, b, k), scale=2.0),
    "jit": jax.jit(loss),
    "checkpoint": jax.checkpoint(loss),
    "nnx.jit": nnx.jit(loss),
    "wrapped": wrapped,
}


@pytest.mark.parametrize("name", ZERO)
@pytest.mark.parametrize("mode", ["jit", exhaustive("shard_map")])
def test_a_loss_without_a_gradient_is_refused(name: str, mode: str) -> None:
    with pytest.raises(LossError, match=r"gradient of 0.*stop_gradient"):
        step(ZERO[name], mode=mode)
    dp = make(ZERO[name], mode=mode)
    assert dp.evaluate(dp.init(MODEL), [ROWS])["rows"] == 8


@pytest.mark.parametrize("name", TRAINS)
def test_a_loss_of_three_arguments_with_a_gradient_somewhere_trains(name: str) -> None:
    assert 0 < step(TRAINS[name])["loss"] < np.inf


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_with_logits_beside_it_is_refused_with_their_shapes(mode: str) -> None:
    dp = make(lambda *a: (loss(*a), a[1]["x"]), mode=mode)
    state = dp.init(MODEL)
    for call in step_and_evaluate(dp):
        words = "(float32[8], float32[8,3])", "dict"
        said = refused(LossError, functools.partial(call, state, ROWS), *words)
        assert "Tracer" not in said


DRAWS = {
    "split": lambda key: jax.random.normal(jax.random.split(key)[0], (8,)),
    "fold": lambda key: jax.random.normal(jax.random.fold_in(key, 1), (8,)),
    "draw": lambda key: jax.random.normal(key, (8,)),
    "index": lambda key: jax.random.key_data(key)[0] * jnp.zeros(8),
}


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("trained", [False, True])
def test_a_loss_that_needs_the_key_in_evaluation_is_told_so(draw: str, trained: bool) -> None:
    dp = make(lambda m, b, key: loss(m, b, key) + DRAWS[draw](key)[: len(b["x"])])
    state = dp.init(MODEL)
    if trained:
        state, _ = dp.step(state, ROWS)
    with pytest.raises((TypeError, ValueError)) as caught:
        dp.evaluate(state, [ROWS])
    assert "key=None" in caught.value.__notes__[0]


def test_an_error_of_the_loss_in_evaluation_is_its_own() -> None:
    calls = []

    def wrong(*arguments: Any) -> Any:
        calls.append(arguments)
        return loss(*arguments) @ jnp.ones((4, 4))

    dp = make(wrong)
    with pytest.raises(TypeError, match=r"\(4, 4\)|\(4,\)"):
        dp.evaluate(dp.init(MODEL), [ROWS])
    assert len(calls) == 1

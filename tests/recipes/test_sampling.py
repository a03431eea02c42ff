"""Sampling from networks with known outputs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from replicax.errors import ConfigError
from replicax.recipes import transformer
from replicax.recipes.gpt2 import sample
from replicax.recipes.transformer import Params, Shape

VOCAB_SIZE, HEADS, END = 13, 2, 12
SHAPE = Shape(layers=1, heads=HEADS, width=16, context=40, vocab_size=VOCAB_SIZE)


@functools.cache
def a_network() -> Params:
    """A model whose logits are far apart."""
    return jax.tree.map(lambda leaf: 20 * leaf, transformer.init(SHAPE, jax.random.key(0)))


def network(params: Any, tokens: jax.Array) -> jax.Array:
    return transformer.logits(params, tokens, HEADS)


def successor(last: jax.Array, tokens: jax.Array) -> jax.Array:
    """Predicts after each token the next, and after `last` the first."""
    after = jnp.where(tokens == last, 0, tokens + 1)
    return 50.0 * jax.nn.one_hot(after, VOCAB_SIZE)


def fixed(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Predicts the same after any token."""
    return jnp.broadcast_to(logits, (*tokens.shape, *logits.shape))


def test_the_likeliest_is_the_argmax_step_by_step() -> None:
    prompt = [3, 1, 4]
    found = sample(network, a_network(), prompt, count=50, context=40, end=-1, temperature=0)
    compute = jax.jit(network)
    seen = list(prompt)
    for token in found:
        # Here without padding: of the tokens alone, and no more than the context.
        window = seen[-40:]
        at = len(window) - 1
        padded = np.array(window + [7] * (40 - len(window)))
        assert token == int(compute(a_network(), padded[None])[0, at].argmax())
        seen.append(token)
    assert len(found) == 50
    assert len(set(found)) > 2


def test_no_more_than_the_context_is_seen() -> None:
    windows = set()

    def watched(params: Any, tokens: jax.Array) -> jax.Array:
        windows.add(tokens.shape)
        return successor(params, tokens)

    prompt = [0] * 90 + [5]
    found = sample(watched, 9, prompt, count=120, context=100, end=-1)
    assert found[:12] == [6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7]
    assert len(found) == 120
    assert windows == {(1, 100)}
    windows.clear()
    sample(watched, 9, [5], count=99, context=100, end=-1)
    assert windows == {(1, 32), (1, 64), (1, 100)}


def test_it_stops_at_the_end_of_the_text_and_leaves_it_out() -> None:
    assert sample(successor, 12, [8], count=50, context=40, end=END) == [9, 10, 11]
    assert sample(successor, 12, [11], count=50, context=40, end=END) == []
    assert sample(successor, 12, [8], count=2, context=40, end=END) == [9, 10]
    assert sample(successor, 12, [8], count=0, context=40, end=END) == []


def test_the_seed_decides_and_the_count_does_not() -> None:
    def draw(count: int, seed: int) -> list[int]:
        return sample(fixed, jnp.zeros(9), [0], count=count, context=4, end=-1, seed=seed)

    assert draw(30, 0) == draw(30, 0)
    assert draw(30, 0) != draw(30, 1)
    assert draw(10, 0) == draw(30, 0)[:10]


def test_draws_are_as_likely_as_the_network_says() -> None:
    odds = jnp.log(jnp.array([0.6, 0.3, 0.1]))
    for temperature in (1.0, 0.5):
        drawn = sample(fixed, odds, [0], count=2000, context=4, end=-1, temperature=temperature)
        expected = np.array([0.6, 0.3, 0.1]) ** (1 / temperature)
        share = np.bincount(drawn, minlength=3) / 2000
        np.testing.assert_allclose(share, expected / expected.sum(), atol=0.04)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prompt": []}, "the text to continue is empty; provide at least one character"),
        ({"temperature": -0.5}, "temperature=-0.5; it must be at least 0: raise it"),
        ({"temperature": float("nan")}, "temperature=nan; it must be at least 0: raise it"),
        ({"count": -1}, "count=-1; it must be at least 0: raise it"),
    ],
)
def test_what_cannot_be_drawn_is_refused(changed: dict[str, Any], message: str) -> None:
    good = {"prompt": [1], "count": 1, "context": 40, "end": END}
    with pytest.raises(ConfigError) as caught:
        sample(successor, 12, **good | changed)
    assert str(caught.value) == message

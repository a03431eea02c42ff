"""Continuing a text with a trained network."""

from collections.abc import Callable, Sequence, Sized
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.errors import ConfigError

SMALLEST_WINDOW = 32


def sample(
    logits: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    prompt: Sequence[int],
    *,
    count: int,
    context: int,
    end: int,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[int]:
    """Tokens drawn one after the other, each from what the network expects after those before it.

    Args:
        logits: of `params` and ints `[1, tokens]`, `[1, tokens, vocab_size]`.
        params: arrays that lie on one device.
        prompt: at least one token.
        count: tokens to draw at most.
        context: the most tokens `logits` takes; of more, the last ones are used.
        end: a token to stop at, which is left out.
        temperature: below 1 for likelier tokens, 0 for the likeliest.
        seed: of the draws.

    Raises:
        ConfigError: an empty prompt, or a count or temperature below 0.
    """
    check_sampling(prompt, count, temperature)

    @jax.jit  # `params` as an argument: what is closed over becomes part of the program
    def draw(params: Any, window: jax.Array, filled: jax.Array, key: jax.Array) -> jax.Array:
        last = logits(params, window[None])[0, filled - 1].astype(jnp.float32)
        if temperature == 0:
            return jnp.argmax(last)
        return jax.random.categorical(key, last / temperature)

    tokens = [int(token) for token in prompt]
    for key in jax.random.split(jax.random.key(seed), count):
        seen = tokens[-context:]
        # Windows of a few sizes: a program for each, and short texts cost little.
        size = min(max(SMALLEST_WINDOW, 1 << (len(seen) - 1).bit_length()), context)
        window = np.zeros(size, np.int32)
        window[: len(seen)] = seen
        drawn = int(draw(params, window, np.int32(len(seen)), key))
        if drawn == end:
            break
        tokens.append(drawn)
    return tokens[len(prompt) :]


def check_sampling(prompt: Sized, count: int, temperature: float) -> None:
    """Raise `ConfigError` for what `sample` cannot do."""
    if not len(prompt):
        raise ConfigError("the text to continue is empty; give at least one character")
    for name, value in (("count", count), ("temperature", temperature)):
        if not value >= 0:
            raise ConfigError(f"{name}={value}; it is at least 0: raise it")

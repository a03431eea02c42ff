"""Continuing a text with a trained network."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from replicax.errors import ConfigError

SMALLEST_WINDOW = 32


def sample(
    logits: Callable[[jax.Array], jax.Array],
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
        logits: of ints `[1, tokens]`, `[1, tokens, vocab_size]`.
        prompt: at least one token.
        count: tokens to draw at most.
        context: the most tokens `logits` takes; of more, the last ones are used.
        end: a token to stop at, which is left out.
        temperature: below 1 for likelier tokens, 0 for the likeliest.
        seed: of the draws.

    Raises:
        ConfigError: an empty prompt, or a temperature below 0.
    """
    if not prompt:
        raise ConfigError("the text to continue is empty; give at least one character")
    if temperature < 0:
        raise ConfigError(f"temperature={temperature}; it is at least 0: raise it")

    @jax.jit
    def draw(window: jax.Array, filled: jax.Array, key: jax.Array) -> jax.Array:
        last = logits(window[None])[0, filled - 1].astype(jnp.float32)
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
        drawn = int(draw(jnp.asarray(window), jnp.asarray(len(seen)), key))
        if drawn == end:
            break
        tokens.append(drawn)
    return tokens[len(prompt) :]

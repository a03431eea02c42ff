"""Random keys of JAX, as the numbers that they are on the host and in files."""

from typing import Any

import jax
import jax.numpy as jnp


def is_random_key(leaf: Any) -> bool:
    """Whether `leaf` holds typed random keys, which have numbers inside but are none."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def numbers(leaf: Any) -> Any:
    """Of random keys, their numbers (uint32 `[..., words]`); anything else as it is."""
    return jax.random.key_data(leaf) if is_random_key(leaf) else leaf

"""Leaves of a pytree as the numbers they hold, and in a few characters, to compare them."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_random_key(leaf: Any) -> bool:
    """Whether `leaf` holds typed random keys, which have numbers inside but are none."""
    is_array = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
    return is_array and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def numbers(leaf: Any) -> Any:
    """Return the numbers (uint32 `[..., words]`) of random keys; anything else as it is."""
    return jax.random.key_data(leaf) if is_random_key(leaf) else leaf


def describe_leaves(data: Any) -> dict[str, str]:
    """Return dtype, shape and checksum of each array in `data`, by path."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        array = np.ascontiguousarray(numbers(leaf))
        kind, checksum = f"{array.dtype}{list(array.shape)}", zlib.crc32(array.tobytes())
        described[jax.tree_util.keystr(path) or "data"] = f"{kind} {checksum:08x}"
    return described

"""Leaves of a pytree: by dtype, as the numbers they hold, and in a few characters."""

import zlib
from collections.abc import Callable
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


def by_dtype(function: Callable[[list[jax.Array]], list[jax.Array]], tree: Any) -> Any:
    """Return `tree` with `function(leaves)` for the leaves of each dtype."""
    leaves, structure = jax.tree.flatten(tree)
    places_of: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        places_of.setdefault(leaf.dtype, []).append(place)
    for places in places_of.values():
        changed = function([leaves[place] for place in places])
        for place, leaf in zip(places, changed, strict=True):
            leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


def shapes_by_path(tree: Any) -> dict[str, str]:
    """Return dtype and shape of each array in `tree`, or of its `jax.ShapeDtypeStruct`, by path."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def describe_leaves(data: Any) -> dict[str, str]:
    """Return dtype, shape and checksum of each array in `data`, by path."""
    described = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        array = np.ascontiguousarray(numbers(leaf))
        kind, checksum = f"{array.dtype}{list(array.shape)}", zlib.crc32(array.tobytes())
        described[jax.tree_util.keystr(path) or "data"] = f"{kind} {checksum:08x}"
    return described

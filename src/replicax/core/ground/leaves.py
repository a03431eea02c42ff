"""Utilities for pytree leaves: group by dtype, convert random keys, and describe."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
from jax.sharding import Sharding

PyTree = Any
"""Any nested structure of containers that JAX knows, with arrays as leaves."""


def is_random_key(leaf: Any) -> bool:
    """Whether `leaf` holds typed random keys, which wrap numbers but are not numbers."""
    is_array = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
    return is_array and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def numbers(leaf: Any) -> Any:
    """Return the numbers (uint32 `[..., words]`) of random keys; other leaves unchanged."""
    return jax.random.key_data(leaf) if is_random_key(leaf) else leaf


def is_here(leaf: Any) -> bool:
    """Whether this process has all of an array."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def whole_on_host(array: Any) -> np.ndarray:
    """Return an array on the host; if it spans processes, all of them must call this together."""
    if is_here(array) or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def by_dtype(function: Callable[[list[jax.Array]], list[jax.Array]], tree: Any) -> Any:
    """Return `tree` with the leaves of each dtype replaced by `function(leaves)`."""
    leaves, structure = jax.tree.flatten(tree)
    places_of: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        places_of.setdefault(leaf.dtype, []).append(place)
    for places in places_of.values():
        changed = function([leaves[place] for place in places])
        for place, leaf in zip(places, changed, strict=True):
            leaves[place] = leaf
    return jax.tree.unflatten(structure, leaves)


def in_one_call(function: Callable[[jax.Array], jax.Array]) -> Callable[..., list[jax.Array]]:
    """Return a function of arrays `[rows, ...]` of one dtype that calls `function` only once."""

    def of_all(leaves: list[jax.Array]) -> list[jax.Array]:
        if len(leaves) == 1:
            return [function(leaves[0])]
        _, unpack = ravel_pytree([leaf[0] for leaf in leaves])
        whole = function(jax.vmap(lambda row: ravel_pytree(row)[0])(leaves))
        return list(jax.vmap(unpack)(whole))

    return of_all


def divided(values: Iterable[Any], flags: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the `values` whose flag is set, and the others."""
    pairs = list(zip(values, flags, strict=True))
    return [value for value, flag in pairs if flag], [value for value, flag in pairs if not flag]


def merged(flagged: Iterable[Any], others: Iterable[Any], flags: Sequence[bool]) -> list[Any]:
    """Merge the two lists returned by `divided`."""
    sides = iter(others), iter(flagged)
    return [next(sides[flag]) for flag in flags]


def takes(tree: Any, *others: Any) -> bool:
    """Whether the classes in `tree` can be made with each of `others` in place of all leaves.

    A constructor may look at its arguments, or replace them.
    """
    leaves, structure = jax.tree.flatten(tree)
    try:
        return all(
            jax.tree.leaves(jax.tree.unflatten(structure, [each] * len(leaves)))
            == jax.tree.leaves([each] * len(leaves))
            for each in others
        )
    except Exception:  # the user's constructor
        return False


def from_host(leaf: Any, sharding: Sharding) -> jax.Array:
    """Place an array or random keys by `sharding`; this process has the whole value."""
    host = np.asarray(numbers(leaf))
    placed: jax.Array = jax.make_array_from_callback(host.shape, sharding, host.__getitem__)
    if is_random_key(leaf):
        placed = jax.random.wrap_key_data(placed, impl=jax.random.key_impl(leaf))
    return placed


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of `tree` by path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def kind(leaf: Any) -> str:
    """Return the dtype and shape of an array or a `jax.ShapeDtypeStruct`."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def shapes_by_path(tree: Any) -> dict[str, str]:
    """Return the `kind` of each array in `tree`, by path."""
    return {path: kind(leaf) for path, leaf in by_path(tree).items()}


def kind_changes(
    before: Any, after: Any, kind: Callable[[Any], str] = kind
) -> Iterator[tuple[str, str, str]]:
    """Yield path and both kinds of each leaf whose kind differs between two trees."""
    was, now = ({p: kind(leaf) for p, leaf in by_path(tree).items()} for tree in (before, after))
    for path in {**was, **now}:
        if was.get(path) != now.get(path):
            yield path, was.get(path, "missing"), now.get(path, "missing")


def checksum_here(data: Any) -> str:
    """Return a checksum of what this process has of arrays that are split along dims, if at all."""
    found = 0
    for leaf in map(numbers, jax.tree.leaves(data)):
        pieces = {
            tuple(of.start or 0 for of in piece.index): piece.data
            for piece in jnp.asarray(leaf).addressable_shards
        }
        for place in sorted(pieces):
            array = np.ascontiguousarray(pieces[place])
            found = zlib.crc32(array.reshape(-1).view(np.uint8), found)
    return f"{found:08x}"


def describe_leaves(data: Any) -> dict[str, str]:
    """Return the dtype, shape and checksum of each array in `data`, by path."""
    described = {}
    for path, leaf in by_path(data).items():
        array = np.ascontiguousarray(numbers(leaf))
        data = array.reshape(-1).view(np.uint8)  # not all dtypes are buffers
        described[path or "data"] = f"{kind(array)} {zlib.crc32(data):08x}"
    return described

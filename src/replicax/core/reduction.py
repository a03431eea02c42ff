"""Replicas' sums -> global sums."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

PyTree = Any


def reduce(sums: PyTree, axis: str | None) -> PyTree:
    """The sum over all replicas, in one reduction; `sums` itself where there is no axis."""
    if axis is None:
        return sums
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # XLA:CPU has Gloo send every array of a tuple by itself.
        return _as_vectors(sums, partial(lax.psum, axis_name=axis))
    return lax.psum(sums, axis)


def reduce_by_tree(sums: PyTree, axis: str | None) -> PyTree:
    """As `reduce`, added by a binary tree over the replicas, whose number is a power of two.

    Each replica adds one part of the vector, of which all send it theirs, and sends the result to
    all: 2 (N - 1) / N of the vector's bytes, which is what a ring all-reduce moves.
    """
    replicas = 1 if axis is None else lax.axis_size(axis)
    if replicas == 1:
        return sums

    def add(vector: jax.Array) -> jax.Array:
        padded = jnp.pad(vector, (0, -vector.size % replicas))
        parts = lax.all_to_all(padded.reshape(replicas, -1), axis, 0, 0)
        while len(parts) > 1:
            parts = parts[0::2] + parts[1::2]
        total: jax.Array = lax.all_gather(parts[0], axis, tiled=True)[: vector.size]
        return total

    return _as_vectors(sums, add)


def _as_vectors(sums: PyTree, add: Callable[[jax.Array], jax.Array]) -> PyTree:
    """`add` on one vector of each dtype.

    The barriers keep XLA from computing the gradient inside the loop that packs it, which is slow.
    """
    leaves, tree = jax.tree.flatten(lax.optimization_barrier(sums))
    places_of: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        places_of.setdefault(leaf.dtype, []).append(place)
    for places in places_of.values():
        vector, unpack = ravel_pytree([leaves[place] for place in places])
        totals = unpack(lax.optimization_barrier(add(vector)))
        for place, total in zip(places, totals, strict=True):
            leaves[place] = total
    return jax.tree.unflatten(tree, leaves)

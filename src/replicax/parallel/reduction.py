"""Replicas' sums -> global sums."""

from typing import Any

import jax
from jax import lax
from jax.flatten_util import ravel_pytree

PyTree = Any


def reduce(sums: PyTree, axis: str | None) -> PyTree:
    """The sum over all replicas, in one reduction; `sums` itself where there is no axis."""
    if axis is None:
        return sums
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        return _reduce_flat(sums, axis)
    return lax.psum(sums, axis)


def _reduce_flat(sums: PyTree, axis: str) -> PyTree:
    """As one vector of each dtype: XLA:CPU has Gloo send every array of a tuple by itself.

    The barriers keep XLA from computing the gradient inside the loop that packs it, which is slow.
    """
    leaves, tree = jax.tree.flatten(lax.optimization_barrier(sums))
    places_of: dict[Any, list[int]] = {}
    for place, leaf in enumerate(leaves):
        places_of.setdefault(leaf.dtype, []).append(place)
    for places in places_of.values():
        vector, unpack = ravel_pytree([leaves[place] for place in places])
        totals = unpack(lax.optimization_barrier(lax.psum(vector, axis)))
        for place, total in zip(places, totals, strict=True):
            leaves[place] = total
    return jax.tree.unflatten(tree, leaves)

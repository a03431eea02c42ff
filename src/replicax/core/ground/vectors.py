"""Trees of arrays as vectors: of whole blocks for a codec, or one per dtype for a collective."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from replicax.core.ground.codecs import BLOCK, filled
from replicax.core.ground.leaves import PyTree, by_dtype

Axes = str | tuple[str, ...]
"""One axis or several, as `jax.lax.psum` takes them."""


def all_reduce(sums: PyTree, axis: Axes) -> PyTree:
    """Return the sum over all replicas, in one reduction."""
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # XLA:CPU has Gloo send each array of a tuple separately.
        return as_vectors(sums, partial(lax.psum, axis_name=axis))
    return lax.psum(sums, axis)


def as_vectors(sums: PyTree, add: Callable[[jax.Array], jax.Array], multiple: int = 1) -> PyTree:
    """Apply `add` to one vector per dtype, padded to a `multiple`.

    The barriers keep XLA from computing the gradient inside the loop that packs it, which is slow.
    """

    def added(leaves: list[jax.Array]) -> list[jax.Array]:
        size = sum(leaf.size for leaf in leaves)
        filled = [*leaves, jnp.zeros(-size % multiple, leaves[0].dtype)]
        vector, unpack = ravel_pytree(filled)
        return list(unpack(lax.optimization_barrier(add(vector))))[:-1]

    return by_dtype(added, lax.optimization_barrier(sums))


def as_blocks(tree: PyTree) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """Return one float32 vector, in which each leaf has whole blocks, and the function back."""
    leaves, structure = jax.tree.flatten(tree)
    reals = [jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x for x in leaves]
    rows = [filled(real.astype(jnp.float32).reshape(-1), BLOCK) for real in reals]
    vector, split = ravel_pytree(rows)

    def unpack(vector: jax.Array) -> PyTree:
        found = []
        for leaf, real, part in zip(leaves, reals, split(vector), strict=True):
            values = part[: real.size].reshape(real.shape)
            if jnp.iscomplexobj(leaf):
                values = lax.complex(values[0], values[1])
            found.append(values.astype(leaf.dtype))
        return jax.tree.unflatten(structure, found)

    return vector, unpack


def size_in_blocks(leaves: Iterable[Any]) -> int:
    """Return the length of the vector of `as_blocks`, from shapes."""
    sizes = [leaf.size * (2 if jnp.iscomplexobj(leaf) else 1) for leaf in leaves]
    return sum(size + -size % BLOCK for size in sizes)

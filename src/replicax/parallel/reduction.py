"""Replicas' sums -> global sums."""

from typing import Any

from jax import lax

PyTree = Any


def reduce(sums: PyTree, axis: str | None) -> PyTree:
    """The sum over all replicas, in one reduction; `sums` itself where there is no axis."""
    return sums if axis is None else lax.psum(sums, axis)

"""Padded rows of a batch whose rows have a state: copies of a real row, with its state."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from replicax.core.data.batch import Batch
from replicax.core.data.per_row import map_rows_of_state, rows_of_state
from replicax.core.ground.leaves import PyTree, by_dtype, is_random_key, numbers


def with_copies(
    params: PyTree,
    batch: Batch,
    gather: Callable[[list[jax.Array]], list[jax.Array]] | None,
) -> tuple[PyTree, Batch]:
    """Return a state and a batch whose padded rows are copies of the first real row of all.

    A padded entry of the state is its own, and may be one that no step has written: a loss that is
    not finite there would make the gradient NaN, although its weight is 0. A replica may have no
    real row, so one of each replica is gathered; that costs one row of the batch and the state.
    """
    if not (states := [rows.value for rows in rows_of_state(params)]):
        return params, batch
    own = states, dataclasses.replace(batch, count=None, shared=(), sets=())
    one = jax.tree.map(lambda leaf: _picked(numbers(leaf), batch.mask), own)
    if gather is not None:
        of_each = by_dtype(gather, jax.tree.map(lambda leaf: leaf[None], one))
        mask = of_each[1].mask
        one = jax.tree.map(lambda leaf: _picked(leaf, mask), of_each)
    states, filled = jax.tree.map(lambda leaf, row: _where(batch.mask, leaf, row), own, one)
    values = iter(states)
    return map_rows_of_state(
        lambda rows: dataclasses.replace(rows, value=next(values)), params
    ), dataclasses.replace(batch, data=filled.data, index=filled.index)


def with_padding_kept(before: PyTree, after: PyTree, mask: jax.Array) -> PyTree:
    """Return the state after a step, with the rows of padding as they were."""
    old = iter(rows_of_state(before))

    def kept(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(_of_rows(mask, new), new, old)

    return map_rows_of_state(lambda rows: jax.tree.map(kept, rows, next(old)), after)


def _picked(leaf: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the first row of numbers that is real; the last one if none is.

    As a sum, which the compiler computes where the rows are: an index would gather all of them.
    """
    places = jnp.arange(len(mask))
    is_first = places == jnp.min(jnp.where(mask > 0, places, len(mask) - 1))
    row = jnp.where(_of_rows(is_first, leaf), leaf, jnp.zeros_like(leaf))
    return jnp.any(row, axis=0) if leaf.dtype == bool else jnp.sum(row, axis=0, dtype=leaf.dtype)


def _where(mask: jax.Array, leaf: jax.Array, row: jax.Array) -> jax.Array:
    if is_random_key(leaf):
        row = jax.random.wrap_key_data(row, impl=jax.random.key_impl(leaf))
    return jnp.where(_of_rows(mask, leaf), leaf, row)


def _of_rows(mask: jax.Array, leaf: jax.Array) -> jax.Array:
    return mask.reshape(-1, *[1] * (leaf.ndim - 1)) > 0

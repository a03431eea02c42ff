"""States and batches like given ones: other parameters, rows, masks and step numbers."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.ground.train_state import TrainState
from replicax.core.jaxprs.row_evaluation import uniform

_ALMOST = 1 - 2.0**-20


def moved_to_one_device(state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
    """Return `state` and `batch` on one CPU device, for which programs compile faster."""
    if jax.default_backend() != "cpu":  # one device may lack the memory for all rows
        return state, batch
    leaves = [leaf for leaf in jax.tree.leaves((state, batch)) if isinstance(leaf, jax.Array)]
    whole = all(leaf.is_fully_addressable for leaf in leaves)
    if not whole or not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(state)):
        return state, batch
    state = jax.tree.map(lambda leaf: leaf.addressable_data(0), state)
    return state, jax.device_put(batch, jax.tree.leaves(state)[0].device)


def other_inputs(
    parts: np.ndarray,
    state: TrainState,
    batch: Batch,
    trial: jax.Array,
    step: jax.Array,
) -> tuple[TrainState, Batch]:
    """Return others like `state` and `batch` for a step number above 0, else these.

    The mask is 1 for the rows in `parts`. Others are padding: copies of these, or far larger.
    """
    real = np.zeros(batch.size, np.float32)
    real[parts.reshape(-1)] = 1
    pads = (np.arange(batch.size) % parts.size)[real == 0]
    numbers, change = itertools.count(), step > 0

    def drawn(leaf: jax.Array) -> jax.Array:
        """Return a leaf of uniform numbers in the range of its own.

        With padding, floats of later trials have the other sign, and both, and are larger, and then
        so small that what saturates (tanh of a sum over padding) does not hide what it is of.

        Of integers, later trials have all lowest but for one row, and all highest: what asks for
        any or for all of the rows must change.
        """
        share = uniform(trial, next(numbers), leaf.shape)
        if leaf.ndim and not jnp.issubdtype(leaf.dtype, jnp.floating):
            lone = jnp.arange(len(leaf)) == len(leaf) // 3
            lone = lone.reshape(-1, *[1] * (leaf.ndim - 1))
            share = jnp.where(trial == 2, jnp.where(lone, _ALMOST, 0), share)
            share = jnp.where(trial == 3, jnp.where(lone, 0, _ALMOST), share)
        if leaf.dtype == bool:
            return jnp.where(change, share > 0.5, leaf)
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        if not leaf.size or not (floating or jnp.issubdtype(leaf.dtype, jnp.integer)):
            return leaf
        low, high = jnp.min(leaf).astype(jnp.float32), jnp.max(leaf).astype(jnp.float32)
        same = low == high
        low = jnp.where(same, jnp.minimum(low, 0), low)
        high = jnp.where(same, jnp.maximum(high, 1), high) + (not floating)
        value = low + share * (high - low)
        if len(pads) and floating:  # weights of 0 are right for a maximum, if all are positive
            flags = jnp.all((leaf == 0) | (leaf == 1))
            reach = 3 * jnp.maximum(jnp.abs(low), jnp.abs(high))
            value = jnp.where((trial == 2) & ~flags, -3 * value, value)
            reach = jnp.where(trial == 3, reach, reach / 300)
            value = jnp.where((trial > 2) & ~flags, (2 * share - 1) * reach, value)
        return jnp.where(change, value.astype(leaf.dtype), leaf)

    def with_padding(leaf: jax.Array) -> jax.Array:
        if not len(pads):
            return leaf
        padding = leaf[parts.reshape(-1)[pads]]
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            padding *= jnp.asarray([1, 1, 30, -30, 30], leaf.dtype)[trial]
        return jnp.where(change, leaf.at[real == 0].set(padding), leaf)

    def moved(leaf: Any) -> Any:
        """Return a leaf with noise; it stays positive if it is."""
        leaf = jnp.asarray(leaf)
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return drawn(leaf)
        size = jnp.sqrt(jnp.mean(jnp.abs(leaf) ** 2))
        noise = jnp.where(size > 0, size, 0.2) * (uniform(trial, next(numbers), leaf.shape) - 0.5)
        noisy = leaf + noise.astype(leaf.dtype)
        if not jnp.iscomplexobj(leaf):
            noisy = jnp.where(jnp.all(leaf >= 0), jnp.abs(noisy), noisy)
        return jnp.where(change, noisy, leaf)

    changed = jax.tree.map(moved, dataclasses.replace(state, step=(), seed=()))
    at = jnp.where(change, step, state.step)
    return dataclasses.replace(changed, step=at, seed=state.seed), dataclasses.replace(
        batch,
        data=jax.tree.map(lambda leaf: with_padding(drawn(leaf)), batch.data),
        shared=jax.tree.map(moved, batch.shared),
        mask=jnp.asarray(real),
    )

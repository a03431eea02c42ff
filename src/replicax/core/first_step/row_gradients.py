"""Compare the gradient of a loss with padding with that of its real rows alone, in numbers.

Values may agree where gradients do not: a choice whose derivative is that of something else.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from replicax.core.data.batch import Batch
from replicax.core.first_step.examiner import Trace
from replicax.core.ground.train_state import TrainState
from replicax.core.jaxprs.row_dependence import Follow
from replicax.core.jaxprs.row_evaluation import RowEvaluation, uniform, wide

_BOUND = 512 * 2.0**-23
"""Maximum difference as a share of the largest entry of a parameter's gradient."""
_LEAST = 0.02
"""Smallest gradient that counts by itself, as a share of the largest of all parameters."""
_COPIES = 2
"""In so many trials padded rows are as large as real ones, so that neither overflows alone."""


def gradients_differ(
    traces: tuple[Trace, Trace],
    follows: tuple[Follow, Follow],
    losses: Sequence[str],
    real: jax.Array,
    state: TrainState,
    batch: Batch,
    trial: jax.Array,
    changes: jax.Array,
) -> jax.Array:
    """Return whether the gradient of the values with these labels, `losses`, depends on padding.

    `traces`, and `follows`, are of all rows and of the `real` ones.
    """
    leaves, structure = jax.tree.flatten(state.params)
    floats = [n for n, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    shares = 0.5 + uniform(trial, -3, (batch.size,))

    def gradient(trace: Trace, follow: Follow, batch: Batch, rows: jax.Array) -> list[jax.Array]:
        weights = shares[rows] * batch.mask

        def total(own: list[Any]) -> jax.Array:
            known = dict(enumerate(leaves)) | dict(zip(floats, own, strict=True))
            params = jax.tree.unflatten(structure, known.values())
            run = RowEvaluation(
                follow,
                trial,
                changes,
                pinned=jnp.asarray(True),
                rows=rows,
                gathers=False,
                widens=True,
                slopes=True,
            )
            run(trace.jaxpr, jax.tree.leaves((dataclasses.replace(state, params=params), batch)))
            seen = [each for label in losses for each in run.seen.get(label, [])]
            return sum((_sum(value, dim, weights) for value, dim in seen), jnp.zeros(()))

        found: list[jax.Array] = jax.grad(total)([wide(leaves[n]) for n in floats])
        return found

    whole = gradient(traces[0], follows[0], batch, jnp.arange(batch.size))
    alone = gradient(traces[1], follows[1], batch.map_rows(lambda leaf: leaf[real]), real)
    sizes = [jnp.max(jnp.abs(jnp.where(jnp.isfinite(leaf), leaf, 0)), initial=0) for leaf in alone]
    largest = jnp.max(jnp.stack([*sizes, jnp.zeros(())]))
    differ = jnp.asarray(False)
    for one, other, size in zip(whole, alone, sizes, strict=True):
        finite = jnp.isfinite(one) & jnp.isfinite(other)
        bound = _BOUND * jnp.maximum(size, _LEAST * largest)
        differ |= jnp.any(jnp.where(finite, jnp.abs(one - other), 0) > bound)
        differ |= (trial < _COPIES) & jnp.any(jnp.isfinite(one) != jnp.isfinite(other))
    return differ


def _sum(value: jax.Array, dim: int | None, weights: jax.Array) -> jax.Array:
    if dim is None:
        return jnp.sum(value)
    rows = jnp.moveaxis(value, dim, 0)
    weights = weights.reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.sum(jnp.where(weights > 0, rows, 0) * weights)

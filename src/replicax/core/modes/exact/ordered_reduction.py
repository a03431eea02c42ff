"""Sums over replicas in a fixed order: a binary tree that rounds at each node.

The bits are those of any number of replicas, a power of two, as the tree may be cut anywhere: a
replica adds a subtree of micro-shards, and the reduction adds the rest.
"""

from functools import partial

import jax
from jax import lax

from replicax.core.ground.leaves import PyTree
from replicax.core.placement.mesh import Axis
from replicax.core.step.base import ReduceReplicas, StepSums
from replicax.core.step.reduction import GradientShards, Reduction, Wire


def reduce_in_order(reduction: Reduction, shards: GradientShards | None = None) -> ReduceReplicas:
    """Return the reduction of mode `exact`, as `Mode.reduce` does."""
    assert isinstance(reduction, Wire)
    add, scatter = partial(add_in_order, reduction), partial(scatter_in_order, reduction)

    def reduce(
        sums: StepSums, reduction_state: PyTree, axis: Axis | None
    ) -> tuple[StepSums, PyTree]:
        assert axis is not None
        total = add(sums, axis) if shards is None else shards.reduce(sums, axis, add, scatter)
        return total, reduction_state

    return reduce


def add_in_order(wire: Wire, sums: PyTree, axis: Axis | None) -> PyTree:
    """Return the sums over all replicas along `axis`."""
    if axis is None or lax.axis_size(axis) == 1:
        return sums
    return wire.add(sums, axis, _by_tree)


def scatter_in_order(wire: Wire, leaf: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """Return this replica's part, along `dim`, of the sum that `add_in_order` computes."""
    return wire.scatter(leaf, axis, dim, _by_tree)


def _by_tree(wire: Wire, rows: jax.Array) -> jax.Array:
    while len(rows) > 1:
        rows = wire.round(rows[0::2] + rows[1::2])
    return rows[0]

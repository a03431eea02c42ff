"""Sums whose bits do not depend on how many replicas there are."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.accumulate import Function, Part, PyTree, folded, zeros_like
from replicax.core.batch import Batch
from replicax.core.precision import to_sum
from replicax.core.reduction import reduce_by_tree
from replicax.errors import ConfigError

MICRO_SHARDS = 8
"""Unless said otherwise."""


@dataclasses.dataclass(frozen=True)
class Canonical:
    """The same bits on any number of replicas, each of which holds some of the micro-shards.

    The global batch is always cut into the same micro-shards, each is summed alone, and a binary
    tree over all of them adds the sums. A replica adds a subtree, the reduction the rest. Keys are
    folded with the micro-shard's number. Every micro-shard starts from the extras before the step;
    after it they are the mean over the micro-shards.
    """

    micro_shards: int

    def __post_init__(self) -> None:
        if self.micro_shards < 1 or self.micro_shards & (self.micro_shards - 1):
            raise ConfigError(
                f"micro_shards={self.micro_shards}; a binary tree adds a power of two of them: use "
                f"{1 << max(self.micro_shards, 1).bit_length()}"
            )

    def micro_batches(self, replicas: int) -> int:
        """Micro-shards of each of `replicas`, computed one after the other.

        Raises:
            ConfigError: they cannot share them out equally.
        """
        if self.micro_shards % replicas:
            fix = f"raise micro_shards to {replicas}"
            if replicas & (replicas - 1):
                fix = f"use {1 << (replicas.bit_length() - 1)} devices"
            raise ConfigError(
                f"mode='exact' with {replicas} replicas and micro_shards={self.micro_shards}; each "
                f"replica has as many of them, a power of two: {fix}"
            )
        return self.micro_shards // replicas

    def __call__(
        self,
        part: Part,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        key: jax.Array | None,
        axis: str | None,
    ) -> tuple[PyTree, PyTree]:
        """See `Summation`."""
        own = self.micro_batches(1 if axis is None else lax.axis_size(axis))
        rows = batch.size // own
        start = 0 if axis is None else lax.axis_index(axis) * own
        once = 1 + (batch.index[0] < 0).astype(jnp.int32)

        def compute(carry: Any) -> Any:
            held, key, count, _ = carry
            sums, after = part(params, extras, held, key, None, True)
            # The inputs change so that nothing which is computed from them leaves the loop.
            held = jax.tree.map(lambda leaf: jnp.where(count < 0, jnp.zeros_like(leaf), leaf), held)
            return held, folded(key, count), count + 1, (sums, _floats(after))

        def micro_shard(number: Any) -> PyTree:
            held = jax.tree.map(
                lambda leaf: lax.dynamic_slice_in_dim(leaf, number * rows, rows), batch
            )
            inputs = (held, folded(key, start + number), jnp.int32(0))
            zeros = zeros_like(jax.eval_shape(compute, (*inputs, None))[-1])
            return self.finish(compute, (*inputs, zeros), once)[-1]

        with jax.named_scope("gradient"):
            local = _tree_sum(micro_shard, 0, own)
        with jax.named_scope("reduction"):
            total, floats = reduce_by_tree(local, axis)
        means = iter([leaf / self.micro_shards for leaf in floats])
        after = jax.tree.map(
            lambda leaf: next(means).astype(leaf.dtype) if _is_float(leaf) else leaf, extras
        )
        return total, after

    def finish(self, function: Function, carry: PyTree, once: jax.Array) -> PyTree:
        """See `Summation`. In a loop it is compiled alike, whatever is around it.

        XLA's own barriers do not keep it from fusing an operation with those before or after, and
        what is fused rounds differently. It neither looks into a loop nor moves out of it what
        changes in it, and keeps one of which it does not know how often it runs.
        """
        return lax.fori_loop(0, once, lambda _, before: function(before), carry)


def _tree_sum(part: Callable[[Any], PyTree], first: Any, count: int) -> PyTree:
    """The sum of `part(first)`, `part(first + 1)`, ..., `count` of them, by a binary tree.

    A loop for each level of the tree holds one sum, and `part` is compiled once.
    """
    if count == 1:
        return part(first)

    def add(half: jax.Array, left: PyTree) -> PyTree:
        here = _tree_sum(part, first + half * (count // 2), count // 2)
        # Zeros plus the left half would turn -0 into 0.
        return jax.tree.map(lambda a, b: jnp.where(half == 0, b, a + b), left, here)

    total: PyTree = lax.fori_loop(0, 2, add, zeros_like(jax.eval_shape(part, 0)))
    return total


def _floats(tree: PyTree) -> list[jax.Array]:
    """The arrays that a step may change, in the dtype of sums."""
    return [to_sum(leaf) for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))

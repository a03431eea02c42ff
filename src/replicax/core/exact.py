"""Mode `exact`: sums whose bits do not depend on how many replicas there are."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from replicax.core.accumulate import Apply, Part, PyTree, folded, scale_of, zeros_like
from replicax.core.batch import Batch
from replicax.core.loss import LOSS
from replicax.core.mesh import Axis
from replicax.core.models.definition import View
from replicax.core.precision import to_sum
from replicax.core.reduction import Wire
from replicax.errors import ConfigError

MICRO_SHARDS = 8
"""By default."""

THREADS_VARIABLE = "NPROC"
"""The environment variable from which XLA takes the number of cores as it starts."""


@dataclasses.dataclass(frozen=True)
class FixedTree:
    """The same bits on any number of replicas, each of which holds some of the micro-shards.

    The global batch is always cut into the same micro-shards, each is summed alone, and a binary
    tree adds the sums: a replica a subtree, the reduction the rest. Keys are folded with the
    micro-shard's number. Every micro-shard starts from the extras before the step; after it they
    are the mean over the micro-shards.
    """

    micro_shards: int
    wire: Wire

    def __post_init__(self) -> None:
        if self.micro_shards < 1 or self.micro_shards & (self.micro_shards - 1):
            raise ConfigError(
                f"micro_shards={self.micro_shards}; a binary tree adds a power of two of them: use "
                f"{1 << max(self.micro_shards, 1).bit_length()}"
            )

    def micro_batches(self, replicas: int) -> int:
        """Return how many each of `replicas` computes, or raise `ConfigError`."""
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
        self, part: Part, state: Any, batch: Batch, key: jax.Array | None, axis: Axis | None
    ) -> tuple[PyTree, PyTree]:
        own = self.micro_batches(1 if axis is None else lax.axis_size(axis))
        rows = batch.size // own
        start = 0 if axis is None else lax.axis_index(axis) * own
        once = 1 + (batch.index[0] < 0).astype(jnp.int32)

        def compute(carry: Any) -> Any:
            held, key, count, _ = carry
            view = View(key, alone=True, part=True, step=state.step, scale=scale_of(state))
            sums, after = part(state.params, state.extras, held, view)
            # The inputs change so that nothing which is computed from them leaves the loop.
            held = jax.tree.map(lambda leaf: jnp.where(count < 0, jnp.zeros_like(leaf), leaf), held)
            return held, folded(key, count), count + 1, (self.wire.rounded(sums), _floats(after))

        def micro_shard(number: Any) -> PyTree:
            held = jax.tree.map(
                lambda leaf: lax.dynamic_slice_in_dim(leaf, number * rows, rows), batch
            )
            inputs = (held, folded(key, start + number), jnp.int32(0))
            zeros = zeros_like(jax.eval_shape(compute, (*inputs, None))[-1])
            return _repeat(compute, (*inputs, zeros), once)[-1]

        local, floats = self._tree_sum(micro_shard, 0, own)
        means = iter([leaf / self.micro_shards for leaf in _add_replicas(floats, axis)])
        after = jax.tree.map(
            lambda leaf: next(means).astype(leaf.dtype) if _is_float(leaf) else leaf, state.extras
        )
        return local, after

    def replica_key(self, key: jax.Array, _axis: Axis) -> jax.Array:
        """Return the step's own: no bit depends on how many replicas there are."""
        return key

    def isolate(self, apply: Apply, state: Any, total: Any, *rest: PyTree) -> tuple[PyTree, PyTree]:

        def again(carry: Any) -> Any:
            state, loss, _ = carry
            weighted = {**total.weighted, LOSS: loss}
            after, told = apply(state, dataclasses.replace(total, weighted=weighted), *rest)
            # It changes, lest the division by it leave the loop.
            return after, jax.tree.map(lambda leaf: leaf + 1, loss), told

        loss = total.weighted[LOSS]
        told = zeros_like(jax.eval_shape(apply, state, total, *rest)[1])
        once = 1 + (state.step < 0).astype(jnp.int32)
        after, _, told = _repeat(again, (state, loss, told), once)
        return after, told

    def _tree_sum(self, part: Callable[[Any], PyTree], first: Any, count: int) -> PyTree:
        """The sum of `part(first)`, `part(first + 1)`, ..., `count` of them, by a binary tree.

        A loop for each level of the tree holds one sum, and `part` is compiled once.
        """
        if count == 1:
            return part(first)

        def add(half: jax.Array, left: PyTree) -> PyTree:
            here = self._tree_sum(part, first + half * (count // 2), count // 2)
            # Zeros plus the left half would turn -0 into 0.
            sums, floats = jax.tree.map(lambda a, b: jnp.where(half == 0, b, a + b), left, here)
            return self.wire.rounded(sums), floats

        total: PyTree = lax.fori_loop(0, 2, add, zeros_like(jax.eval_shape(part, 0)))
        return total


def fix_threads(micro_shards: int) -> None:
    """Have XLA start as many threads as there are micro-shards. Call it before JAX's first use."""
    os.environ.setdefault(THREADS_VARIABLE, str(micro_shards))


def check_threads(mesh: Mesh, micro_shards: int) -> None:
    """Raise `ConfigError` where a CPU has not as many threads as there are micro-shards.

    XLA starts a thread for each core that the process may use, and at least one for each of its
    devices. With two threads a large product is rounded otherwise than with eight, so that it takes
    a number which every layout and every machine can have.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return
    devices = jax.local_device_count()
    threads = max(_cores(), devices)
    if threads != micro_shards:
        fix = (
            f"raise micro_shards to {1 << (devices - 1).bit_length()}"
            if devices > micro_shards
            else f"set {THREADS_VARIABLE}={micro_shards} before JAX starts"
        )
        raise ConfigError(
            f"mode='exact' with {threads} XLA threads for {devices} CPU devices, and micro_shards="
            f"{micro_shards}; the bits are those of as many threads as micro-shards: {fix}"
        )


def _cores() -> int:
    """As XLA counts them."""
    named = os.environ.get(THREADS_VARIABLE, "")
    if named.isdecimal() and int(named):
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _repeat(function: Callable[[Any], Any], carry: Any, once: jax.Array) -> Any:
    """`function(carry)`, in a loop that runs `once`, which is 1: the compiler must not know it.

    XLA's barriers do not keep it from fusing an operation with its neighbours, and what is fused
    rounds differently. It neither looks into a loop nor moves out of it what changes in it, and
    keeps one of which it does not know how often it runs.
    """
    return lax.fori_loop(0, once, lambda _, before: function(before), carry)


def _add_replicas(floats: list[jax.Array], axis: Axis | None) -> list[jax.Array]:
    return Wire("float32").in_order(floats, axis) if floats else floats


def _floats(tree: PyTree) -> list[jax.Array]:
    """The arrays that a step may change, in the dtype of sums."""
    return [to_sum(leaf) for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))

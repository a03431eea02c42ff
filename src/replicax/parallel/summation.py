"""How the parts of a global batch are summed: in what order, and what is summed on which device."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from replicax.data.batch import Batch
from replicax.errors import ConfigError
from replicax.parallel.mesh import replica_count
from replicax.parallel.reduction import reduce, reduce_by_tree
from replicax.parallel.threads import check_threads

PyTree = Any
Function = Callable[[PyTree], PyTree]
Part = Callable[..., tuple[PyTree, PyTree]]
"""`part(params, extras, batch, key, axis, alone) -> (sums, extras)`, as `Objective.sums` is."""


class Summation(Protocol):
    """From the sums over some rows to those over the global batch."""

    def micro_batches(self, replicas: int, /) -> int:
        """Parts that each of `replicas` computes one after the other."""

    def __call__(
        self,
        part: Part,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        key: jax.Array | None,
        axis: str | None,
    ) -> tuple[PyTree, PyTree]:
        """The sums over the global batch, and the extras after it.

        Args:
            part: the sums over some rows.
            params: trainable arrays.
            extras: the model's other arrays, before the step.
            batch: this replica's rows.
            key: of the step; None in evaluation.
            axis: the name of the replica axis, or None where the batch is the whole one.
        """

    def finish(self, function: Function, carry: PyTree, once: jax.Array, /) -> PyTree:
        """`function(carry)`, which computes on the sums.

        Args:
            function: returns what it is given, every array of it changed.
            carry: what it is given.
            once: int32 scalar: 1, which the compiler must not know.
        """


@dataclasses.dataclass(frozen=True)
class Running:
    """One micro-batch after the other, and one reduction over the replicas.

    Extras pass from each micro-batch to the next. Keys are folded with the replica's index, where
    each has its own rows, and with the micro-batch's number.
    """

    parts: int = 1

    def micro_batches(self, _replicas: int) -> int:
        """Micro-batches of each replica."""
        return self.parts

    def finish(self, function: Function, carry: PyTree, _once: jax.Array) -> PyTree:
        """See `Summation`."""
        return function(carry)

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
        key = key if axis is None else _folded(key, lax.axis_index(axis))
        with jax.named_scope("gradient"):
            local, extras = self._local(part, params, extras, batch, key, axis)
        with jax.named_scope("reduction"):
            return reduce(local, axis), extras

    def _local(
        self,
        part: Part,
        params: PyTree,
        extras: PyTree,
        batch: Batch,
        key: jax.Array | None,
        axis: str | None,
    ) -> tuple[PyTree, PyTree]:
        if self.parts == 1:
            return part(params, extras, batch, _folded(key, 0), axis, False)

        def add(carry: tuple[PyTree, PyTree], numbered: tuple[jax.Array, Batch]) -> Any:
            total, extras = carry
            number, rows = numbered
            sums, extras = part(params, extras, rows, _folded(key, number), axis, False)
            return (jax.tree.map(jnp.add, total, sums), extras), None

        parts = jax.tree.map(partial(_cut, parts=self.parts), batch)
        first = jax.tree.map(lambda leaf: leaf[0], parts)
        shapes, _ = jax.eval_shape(
            lambda *arguments: part(*arguments, axis, False), params, extras, first, key
        )
        carry, _ = lax.scan(add, (_zeros_like(shapes), extras), (jnp.arange(self.parts), parts))
        total, extras = carry
        return total, extras


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
            raise ConfigError(
                f"mode='exact' with {replicas} replicas and micro_shards={self.micro_shards}; "
                "each computes as many, a power of two: change the devices, or raise micro_shards"
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
            held = jax.tree.map(lambda leaf: jnp.where(count < 0, 0, leaf), held)
            return held, _folded(key, count), count + 1, (sums, _floats(after))

        def micro_shard(number: Any) -> PyTree:
            held = jax.tree.map(
                lambda leaf: lax.dynamic_slice_in_dim(leaf, number * rows, rows), batch
            )
            inputs = (held, _folded(key, start + number), jnp.int32(0))
            zeros = _zeros_like(jax.eval_shape(compute, (*inputs, None))[-1])
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


def summation_for(mode: str, accumulate: int, micro_shards: int, mesh: Mesh) -> Summation:
    """The one of a mode.

    Args:
        mode: one of `replicax.parallel.lift.MODES`.
        accumulate: micro-batches of each replica; in `exact` the least.
        micro_shards: of `Canonical`.
        mesh: the devices.

    Raises:
        ConfigError: a mesh that cannot share out the micro-shards, or a CPU on which their number
            does not fix the bits.
    """
    if mode != "exact":
        return Running(accumulate)
    canonical, replicas = Canonical(micro_shards), replica_count(mesh)
    own = canonical.micro_batches(replicas)
    if own < accumulate:
        raise ConfigError(
            f"mode='exact' with accumulate={accumulate} on {replicas} replicas and "
            f"micro_shards={micro_shards}; each replica has {own} of them: raise micro_shards to "
            f"{accumulate * replicas}"
        )
    check_threads(mesh, micro_shards)
    return canonical


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

    total: PyTree = lax.fori_loop(0, 2, add, _zeros_like(jax.eval_shape(part, 0)))
    return total


def _zeros_like(shapes: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _floats(tree: PyTree) -> list[jax.Array]:
    """The arrays that a step may change, in the dtype of sums."""
    return [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in _changing(tree)]


def _changing(tree: PyTree) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _folded(key: jax.Array | None, number: Any) -> jax.Array | None:
    return None if key is None else jax.random.fold_in(key, number)


def _cut(array: jax.Array, parts: int) -> jax.Array:
    """`[rows, ...]` -> `[parts, rows / parts, ...]`, part k holding the rows k, k + parts, ...

    Neighbours go to different parts, so that a dim split over devices stays split without moving
    rows, and a micro-batch holds the same rows whatever the number of replicas.
    """
    rows = array.reshape(array.shape[0] // parts, parts, *array.shape[1:])
    return jnp.moveaxis(rows, 1, 0)

"""Mode `exact`: sums that are bitwise identical for any number of replicas."""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from replicax.core.data.batch import Batch
from replicax.core.ground.leaves import PyTree, in_one_call
from replicax.core.ground.precision import to_sum
from replicax.core.ground.train_state import TrainState
from replicax.core.models.definition import CallContext
from replicax.core.models.stateful import Stateful
from replicax.core.modes.exact import micro_shard_primitives
from replicax.core.modes.exact.ordered_reduction import add_in_order
from replicax.core.modes.exact.sharded_update import MicroShard
from replicax.core.placement.mesh import Axis, ShardDim
from replicax.core.step.accumulate import folded, scale_of, zeros_like
from replicax.core.step.base import StepSums, SumsFunction
from replicax.core.step.reduction import REDUCTIONS, Wire
from replicax.errors import ConfigError

_MICRO_SHARDS = "micro_shards"
"""Name of the axis over a replica's micro-shards."""
_Gather = Callable[[list[jax.Array]], list[jax.Array]]

THREADS_VARIABLE = "NPROC"
"""The environment variable from which XLA reads the number of cores at startup."""


@dataclasses.dataclass(frozen=True)
class FixedTree:
    """Sum a fixed set of micro-shards, distributed over any number of replicas.

    Each is summed separately, and a binary tree adds the sums: each replica a subtree, the
    reduction the rest. The micro-shard's number is folded into the key. Every micro-shard starts
    from the extras before the step; afterwards they are averaged over the micro-shards.

    This is the step as one program, used to analyse its computation, traffic and memory. The
    programs actually run are those of one micro-shard: `MicroShardAccumulator`.
    """

    micro_shards: int
    wire: Wire
    gather: ClassVar[None] = None
    row_numbers: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.micro_shards < 1 or self.micro_shards & (self.micro_shards - 1):
            raise ConfigError(
                f"micro_shards={self.micro_shards}; a binary tree needs a power of two: use "
                f"{1 << max(self.micro_shards, 1).bit_length()}"
            )

    def micro_batches(self, replicas: int) -> int:
        """Return the number of micro-shards per replica, or raise `ConfigError`."""
        if self.micro_shards % replicas:
            fix = f"raise micro_shards to {replicas}"
            if replicas & (replicas - 1):
                fix = f"use {1 << (replicas.bit_length() - 1)} devices"
            raise ConfigError(
                f"mode='exact' with {replicas} replicas and micro_shards={self.micro_shards}; each "
                f"replica needs the same number of micro-shards, a power of two: {fix}"
            )
        return self.micro_shards // replicas

    def __call__(
        self,
        function: SumsFunction,
        state: TrainState,
        batch: Batch,
        key: jax.Array | None,
        axis: Axis | None,
    ) -> tuple[StepSums, PyTree]:
        count = self.micro_batches(1 if axis is None else lax.axis_size(axis))
        rows = batch.size // count
        start = 0 if axis is None else lax.axis_index(axis) * count

        def micro_shard(gather: _Gather, number: Any) -> tuple[PyTree, PyTree, PyTree]:
            held = jax.tree.map(
                lambda leaf: lax.dynamic_slice_in_dim(leaf, number * rows, rows), batch
            )
            sums, floats, after = _local(function, state, held, key, start + number, gather)
            summed = dataclasses.replace(sums, rows={})
            return (self.wire.rounded(summed), floats), after, sums.rows

        def alone(number: Any) -> PyTree:
            summed, after, results = micro_shard(_seen_alone, number)
            if isinstance(after, Stateful) or results:
                raise _SeesOthers
            return summed

        extras, by_row = state.extras, dict[str, PyTree]()
        try:
            local, floats = self._tree_sum(alone, 0, count)
        except _SeesOthers:
            gather = in_one_call(partial(_gathered, axis=axis))
            together = jax.vmap(partial(micro_shard, gather), axis_name=_MICRO_SHARDS)
            summed, after, results = together(jnp.arange(count))
            by_row = jax.tree.map(jnp.concatenate, results)
            local, floats = self._tree_sum(lambda n: jax.tree.map(lambda x: x[n], summed), 0, count)
            extras = jax.tree.map(lambda leaf: leaf[0], after)
        floats = add_in_order(REDUCTIONS["float32"], floats, axis)
        local = dataclasses.replace(local, rows=by_row)
        return local, with_means(extras, floats, self.micro_shards)

    def replica_key(self, key: jax.Array, _axis: Axis) -> jax.Array:
        """Return the step's key, so that no bit depends on the number of replicas."""
        return key

    def _tree_sum(self, part: Callable[[Any], PyTree], first: Any, count: int) -> PyTree:
        """Sum `count` values `part(first)`, `part(first + 1)`, ... by a binary tree.

        One loop per level of the tree keeps one sum, and `part` is compiled once.
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


@dataclasses.dataclass(frozen=True)
class MicroShardAccumulator:
    """Sum the rows of one micro-shard with those of all others, while a step is traced on it."""

    piece: MicroShard
    """Its number and the number of micro-shards."""
    wire: Wire
    """Rounds the gradients that are reduced."""
    dims: tuple[ShardDim, ...] | None = None
    """For each gradient leaf, the dim along which it gets one piece of the sum; None: all of it."""

    def micro_batches(self, _replicas: int) -> int:
        return 1

    def __call__(
        self,
        function: SumsFunction,
        state: TrainState,
        batch: Batch,
        key: jax.Array | None,
        _axis: Axis | None,
    ) -> tuple[StepSums, PyTree]:
        number = self.piece.number
        sums, floats, extras = _local(function, state, batch, key, number, self.gather)
        rows, sums = sums.rows, dataclasses.replace(sums, rows={})
        leaves, structure = jax.tree.flatten((sums, floats))
        gradient = len(jax.tree.leaves(sums.gradient))
        rest = len(leaves) - gradient
        dims = self.dims if self.dims and gradient else (None,) * gradient
        total = micro_shard_primitives.sum_all(
            leaves,
            wire=self.wire,
            sent=[True] * gradient + [False] * rest,
            shard_dims=[*dims, *[None] * rest],
            count=self.piece.count,
        )
        sums, floats = jax.tree.unflatten(structure, total)
        sums = dataclasses.replace(sums, rows=rows)
        return sums, with_means(extras, floats, self.piece.count)

    def gather(self, rows: list[jax.Array]) -> list[jax.Array]:
        """Return `rows` of all micro-shards, in order."""
        count = self.piece.count
        return in_one_call(partial(micro_shard_primitives.gather_micro_shards, dim=0, count=count))(
            rows
        )

    def row_numbers(self, rows: int) -> jax.Array:
        """Return the numbers in the whole batch of a micro-shard's so many rows."""
        return _numbers(self.piece.number, rows)

    def replica_key(self, key: jax.Array, _axis: Axis) -> jax.Array:
        return key


class _SeesOthers(Exception):  # noqa: N818
    """Raised if a micro-shard needs rows of others: they are then computed together."""


def _seen_alone(_rows: list[jax.Array]) -> list[jax.Array]:
    raise _SeesOthers


def _gathered(rows: jax.Array, axis: Axis | None) -> jax.Array:
    """Return `rows` of all micro-shards, in order; those of a replica are batched by vmap."""
    rows = lax.all_gather(rows, _MICRO_SHARDS, tiled=True)
    return rows if axis is None else lax.all_gather(rows, axis, tiled=True)


def _numbers(number: Any, rows: int) -> jax.Array:
    found: jax.Array = number * rows + jnp.arange(rows, dtype=jnp.int32)
    return found


def _local(
    function: SumsFunction,
    state: TrainState,
    batch: Batch,
    key: jax.Array | None,
    number: Any,
    gather: _Gather,
) -> tuple[StepSums, list[jax.Array], PyTree]:
    """Return a micro-shard's sums, the model's statistics, and its other arrays afterwards."""
    scale = scale_of(state)
    context = CallContext(
        folded(key, number),
        alone=True,
        part=True,
        step=state.step,
        scale=scale,
        gather=gather,
        row_numbers=partial(_numbers, number),
    )
    sums, after = function(state.params, state.extras, batch, context)
    if isinstance(after, Stateful):  # depends on gathered rows, or on none
        return sums, [], after
    return sums, float_sums(after), state.extras


def with_means(extras: PyTree, floats: list[jax.Array], count: int | jax.Array) -> PyTree:
    """Return `extras` with statistics averaged over `count` micro-shards."""
    if isinstance(extras, Stateful):
        return extras
    means = iter([leaf / count for leaf in floats])
    return jax.tree.map(
        lambda leaf: next(means).astype(leaf.dtype) if _is_float(leaf) else leaf, extras
    )


def fix_threads(micro_shards: int) -> None:
    """Make XLA start one thread per micro-shard. Call this before JAX is first used."""
    os.environ.setdefault(THREADS_VARIABLE, str(micro_shards))


def check_threads(mesh: Mesh, micro_shards: int) -> None:
    """Raise `ConfigError` if XLA's number of CPU threads differs from that of micro-shards.

    XLA starts one thread for each core available to the process, and at least one per device. With
    two threads a large matrix product is rounded differently than with eight, so the number must be
    the same for every layout and on every machine.
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
            f"{micro_shards}; the bits depend on the threads, so both must match: {fix}"
        )


def _cores() -> int:
    """Return the number of cores, counted as XLA does."""
    named = os.environ.get(THREADS_VARIABLE, "")
    if named.isdecimal() and int(named):
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def float_sums(tree: PyTree) -> list[jax.Array]:
    """Return the arrays that a step may change, in the dtype used for sums."""
    return [to_sum(leaf) for leaf in jax.tree.leaves(tree) if _is_float(leaf)]


def _is_float(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))

"""The sums of each replica -> the sums of all: the one communication of a step."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from replicax.core.leaves import by_dtype, divided, merged
from replicax.core.mesh import DATA, FSDP, AnyMesh, Axis, shard_axis, split_dim
from replicax.core.objective import StepSums
from replicax.errors import choose

PyTree = Any
Scatter = Callable[[jax.Array, Axis, int], jax.Array]
"""`scatter(leaf, axis, dim)`: of the sum over `axis`, this replica's part of `dim`."""
Reduce = Callable[[StepSums, PyTree, Axis | None], tuple[StepSums, PyTree]]
"""`reduce(sums, carried, axis) -> (total, carried)`; `axis` is None in the global view."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """Which part of the gradient's total each replica is given, where a layout splits it."""

    dims: tuple[int | None, ...]
    """For each leaf the dim that is split; None where every replica is given the whole."""
    axis: Axis
    """The axis, or axes, that it is split over."""
    others: tuple[str, ...]
    """Axes of other replicas, which are given the same parts."""
    summed: bool
    """Whether the split leaves are parts, summed over `axis`, as soon as they are computed."""

    def reduce(
        self, sums: StepSums, axis: Axis, add: Callable[[Any, Axis], Any], scatter: Scatter
    ) -> StepSums:
        """Return the sums over all replicas, this one's part of those leaves that are split.

        `add(sums, axes)` adds up all replicas along some axes, and `scatter` gives this replica's
        part of one leaf's sum along `self.axis`.
        """
        leaves, structure = jax.tree.flatten(sums.gradient)
        is_split = [dim is not None for dim in self.dims]
        parts, rest = divided(leaves, is_split)
        if not self.summed:
            dims = (dim for dim in self.dims if dim is not None)
            parts = [scatter(leaf, self.axis, dim) for leaf, dim in zip(parts, dims, strict=True)]
        if self.others:
            parts = add(StepSums(parts, {}), self.others).gradient
        whole = add(StepSums(rest, sums.weighted), axis)
        gradient = merged(parts, whole.gradient, is_split)
        return StepSums(jax.tree.unflatten(structure, gradient), whole.weighted)

    def of_total(self, total: StepSums) -> StepSums:
        """Return `total`, which every replica has, with this one's part of what is split."""
        leaves, structure = jax.tree.flatten(total.gradient)
        size, own = lax.axis_size(self.axis), lax.axis_index(self.axis)
        for n, dim in enumerate(self.dims):
            if dim is not None:
                count = leaves[n].shape[dim] // size
                leaves[n] = lax.dynamic_slice_in_dim(leaves[n], own * count, count, dim)
        return dataclasses.replace(total, gradient=jax.tree.unflatten(structure, leaves))


def parts_of(gradient: PyTree, mesh: AnyMesh, *, summed: bool) -> Parts:
    """Return the parts that shardings of a gradient's leaves say; `summed` as there."""
    dims = tuple(split_dim(sharding) for sharding in jax.tree.leaves(gradient))
    specs = [list(sharding.spec) for sharding in jax.tree.leaves(gradient)]
    axes = {spec[dim] for spec, dim in zip(specs, dims, strict=True) if dim is not None}
    [axis] = axes or {shard_axis(mesh)}
    return Parts(dims, axis, (DATA,) if axis == FSDP else (), summed)


class Reduction(Protocol):
    """Adds the replicas' sums, in the per-replica modes.

    One of your own may compress what it sends. What it must remember from step to step (the
    residual of error feedback, say) is its state: each replica has its own, part of `TrainState`.
    Where it has `error(roundings)` as `Wire` has, `replicax verify` allows as much.

    Examples:
        >>> dp = rx.DataParallel(loss, optimizer, mode="shard_map", reduction="bfloat16")
        >>> print(dp.reduction.name)
        bfloat16
    """

    def init(self, params: PyTree) -> PyTree:
        """Return one replica's state before the first step, a pytree of arrays; `()` for none."""

    def __call__(self, sums: StepSums, state: PyTree, axis: Axis) -> tuple[StepSums, PyTree]:
        """Return the sums over all replicas, equal on each, and this replica's next state.

        Args:
            sums: over this replica's rows: `gradient`, a pytree as the parameters, and `weighted`,
                the loss and metrics, whose weights are counts of rows.
            state: of this replica.
            axis: the replica axis or axes, as `jax.lax.psum` takes them.
        """


@dataclasses.dataclass(frozen=True)
class Wire:
    """The plain sum, its gradient rounded to `dtype` wherever it is sent.

    All additions are made in the gradient's own dtype. With `bfloat16` each replica's contribution
    is rounded once, and the total once more, each by at most 2**-8 of itself; see `error`. Loss,
    metrics and weights stay in float32.
    """

    name: str
    dtype: Any = None
    """None sends the gradient in its own dtype."""

    def init(self, params: PyTree) -> PyTree:
        del params
        return ()

    def __call__(self, sums: StepSums, state: PyTree, axis: Axis) -> tuple[StepSums, PyTree]:
        return self.add(sums, axis), state

    def add(self, sums: PyTree, axis: Axis | None, ordered: bool = False) -> PyTree:
        """Return the sums over all replicas along `axis`.

        Those that are `ordered` are added by a binary tree, each node of which is rounded, so that
        the bits do not depend on where it is cut; the replicas are then a power of 2.
        """
        plain = REDUCTIONS["float32"]
        if axis is None or (ordered and lax.axis_size(axis) == 1):
            return sums
        if not ordered and self.dtype is None:
            return all_reduce(sums, axis)
        if self.dtype is None or not isinstance(sums, StepSums):
            return plain._add_in_parts(sums, axis, ordered)
        gradient = self._add_in_parts(sums.gradient, axis, ordered)
        return StepSums(gradient, plain.add(sums.weighted, axis, ordered))

    def scatter(self, leaf: jax.Array, axis: Axis, dim: int, ordered: bool = False) -> jax.Array:
        """Return this replica's part of `dim` of the sum, added as `add` does."""
        if not ordered and self.dtype is None:
            part: jax.Array = lax.psum_scatter(leaf, axis, scatter_dimension=dim, tiled=True)
            return part
        front = jnp.moveaxis(leaf, dim, 0)
        total = self._own_part(front.reshape(lax.axis_size(axis), -1), axis, ordered)
        return jnp.moveaxis(total.reshape(-1, *front.shape[1:]), 0, dim)

    def error(self, roundings: int = 2) -> float:
        """Return the largest error of a total, as a share of the sum of its parts' magnitudes.

        In mode `exact` each micro-shard's sums are a part, rounded once and at every level of the
        tree, which makes as many `roundings`.
        """
        unit = 0.0 if self.dtype is None else float(jnp.finfo(self.dtype).eps) / 2  # type: ignore[no-untyped-call]
        return (1 + unit) ** roundings - 1

    def rounded(self, sums: PyTree) -> PyTree:
        """Round the gradient, if `sums` has one, to what can be sent."""
        if not isinstance(sums, StepSums):
            return sums
        return dataclasses.replace(sums, gradient=jax.tree.map(self.round, sums.gradient))

    def _add_in_parts(self, sums: PyTree, axis: Axis, ordered: bool) -> PyTree:
        """The sums of all replicas. Each replica adds one part of a vector, of which all send it
        theirs, and sends the result to all: 2 (N - 1) / N of the vector's bytes, as a ring
        all-reduce moves.
        """
        replicas = lax.axis_size(axis)

        def add(vector: jax.Array) -> jax.Array:
            total = self._own_part(vector.reshape(replicas, -1), axis, ordered)
            return self._send(total, lambda array: lax.all_gather(array, axis, tiled=True))

        return _as_vectors(sums, add, replicas)

    def _own_part(self, parts: jax.Array, axis: Axis, ordered: bool) -> jax.Array:
        """The sum of all replicas' `parts[own index]`; `ordered` adds by a binary tree."""
        parts = self._send(parts, lambda array: lax.all_to_all(array, axis, 0, 0))
        while ordered and len(parts) > 1:
            parts = self.round(parts[0::2] + parts[1::2])
        return parts[0] if len(parts) == 1 else jnp.sum(parts, axis=0)

    def round(self, leaf: jax.Array) -> jax.Array:
        """Return `leaf`, rounded to what can be sent."""
        if self.dtype is None:
            return leaf
        if jnp.iscomplexobj(leaf):
            return lax.complex(self.round(leaf.real), self.round(leaf.imag))
        kind = jnp.finfo(self.dtype)  # type: ignore[no-untyped-call]
        # A pair of conversions may be left out by XLA, which is free to compute more precisely.
        return lax.reduce_precision(leaf, kind.nexp, kind.nmant)

    def _send(self, array: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Move `array` in the wire's dtype, as integers: a backend may widen floats."""
        if self.dtype is None:
            return move(array)
        if jnp.iscomplexobj(array):
            return lax.complex(self._send(array.real, move), self._send(array.imag, move))
        sent = lax.bitcast_convert_type(array.astype(self.dtype), jnp.uint16)
        return lax.bitcast_convert_type(move(sent), self.dtype).astype(array.dtype)


REDUCTIONS = {each.name: each for each in (Wire("float32"), Wire("bfloat16", jnp.bfloat16))}
"""By the name that `DataParallel(reduction=...)` and `--reduction` take."""


def as_they_are(sums: StepSums, carried: PyTree, _axis: Axis | None) -> tuple[StepSums, PyTree]:
    """Return sums that need no reduction, for they are those of all rows."""
    return sums, carried


def as_reduction(reduction: "str | Reduction") -> Reduction:
    """Return the reduction of that name, or one of the caller's own; or raise `ConfigError`."""
    if callable(reduction) and hasattr(reduction, "init"):
        return reduction
    otherwise = ", or an object with init(params) and __call__(sums, state, axis)"
    return choose("reduction", reduction, REDUCTIONS, otherwise)


def all_reduce(sums: PyTree, axis: Axis) -> PyTree:
    """Return the sum over all replicas, in one reduction."""
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # XLA:CPU has Gloo send every array of a tuple by itself.
        return _as_vectors(sums, partial(lax.psum, axis_name=axis))
    return lax.psum(sums, axis)


def _as_vectors(sums: PyTree, add: Callable[[jax.Array], jax.Array], multiple: int = 1) -> PyTree:
    """`add` on one vector of each dtype, filled up to a `multiple`.

    The barriers keep XLA from computing the gradient inside the loop that packs it, which is slow.
    """

    def added(leaves: list[jax.Array]) -> list[jax.Array]:
        size = sum(leaf.size for leaf in leaves)
        filled = [*leaves, jnp.zeros(-size % multiple, leaves[0].dtype)]
        vector, unpack = ravel_pytree(filled)
        return list(unpack(lax.optimization_barrier(add(vector))))[:-1]

    return by_dtype(added, lax.optimization_barrier(sums))

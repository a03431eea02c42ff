"""Reduce the sums of each replica to those of all: the only communication of a step."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.ground.leaves import PyTree, divided, merged
from replicax.core.ground.vectors import all_reduce, as_vectors
from replicax.core.placement.mesh import DATA, FSDP, AnyMesh, Axis, shard_axis, split_dim
from replicax.core.step.base import StepSums
from replicax.core.step.coded import Coded
from replicax.errors import choose

Scatter = Callable[[jax.Array, Axis, int], jax.Array]
"""`scatter(leaf, axis, dim)`: this replica's part, along `dim`, of the sum over `axis`."""
SumRows = Callable[["Wire", jax.Array], jax.Array]
"""`sum_rows(wire, array)` adds an array over its first dim, rounding as the wire does."""


@dataclasses.dataclass(frozen=True)
class GradientShards:
    """The part of the total gradient that each replica gets, if a layout splits it."""

    dims: tuple[int | None, ...]
    """For each leaf the split dim; None if every replica gets the whole."""
    axis: Axis
    """The axis or axes that it is split over."""
    others: tuple[str, ...]
    """Axes of other replicas, which get the same parts."""
    summed: bool
    """Whether split leaves are already computed as parts, summed over `axis`."""

    def reduce(
        self, sums: StepSums, axis: Axis, add: Callable[[Any, Axis], Any], scatter: Scatter
    ) -> StepSums:
        """Return the sums over all replicas, with this replica's part of split leaves.

        `add(sums, axes)` sums over all replicas along some axes, and `scatter` returns this
        replica's part of one leaf's sum along `self.axis`.
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
        """Return `total`, equal on every replica, with only this replica's part of split leaves."""
        leaves, structure = jax.tree.flatten(total.gradient)
        size, own = lax.axis_size(self.axis), lax.axis_index(self.axis)
        for n, dim in enumerate(self.dims):
            if dim is not None:
                count = leaves[n].shape[dim] // size
                leaves[n] = lax.dynamic_slice_in_dim(leaves[n], own * count, count, dim)
        return dataclasses.replace(total, gradient=jax.tree.unflatten(structure, leaves))


def shards_of(gradient: PyTree, mesh: AnyMesh, *, summed: bool) -> GradientShards:
    """Return the shards given by the shardings of a gradient's leaves."""
    dims = tuple(split_dim(sharding) for sharding in jax.tree.leaves(gradient))
    specs = [list(sharding.spec) for sharding in jax.tree.leaves(gradient)]
    axes = {spec[dim] for spec, dim in zip(specs, dims, strict=True) if dim is not None}
    [axis] = axes or {shard_axis(mesh)}
    return GradientShards(dims, axis, (DATA,) if axis == FSDP else (), summed)


class Reduction(Protocol):
    """Adds the replicas' sums in the per-replica modes.

    A custom reduction may compress the data it sends. Anything it keeps between steps (such as the
    residual of error feedback) is its state: one for each replica, stored in `TrainState`. If it
    has a method `error(roundings)` like `Wire`, `replicax verify` allows that error, and with the
    other methods of `Coded`, also checks what is kept and the bytes that are sent.

    Examples:
        >>> dp = rx.DataParallel(loss, optimizer, mode="shard_map", reduction="bfloat16")
        >>> print(dp.reduction.name)
        bfloat16
    """

    def init(self, params: PyTree) -> PyTree:
        """Return a replica's state before the first step, a pytree of arrays; `()` for none."""

    def __call__(self, sums: StepSums, state: PyTree, axis: Axis) -> tuple[StepSums, PyTree]:
        """Return the sums over all replicas, equal on each, and this replica's next state.

        Args:
            sums: sums over this replica's rows: `gradient`, a pytree like the parameters, of the
                losses over the number of values in the whole batch, and `weighted`, the loss and
                metrics, whose weights are counts of rows.
            state: state of this replica.
            axis: the replica axis or axes, as accepted by `jax.lax.psum`.
        """


@dataclasses.dataclass(frozen=True)
class Wire:
    """The plain sum, with the gradient rounded to `dtype` whenever it is sent.

    Additions use the gradient's own dtype. With `bfloat16` each replica's contribution is rounded
    once, and the total once more, each with a relative error of at most 2**-8; see `error`. Loss,
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

    def add(self, sums: PyTree, axis: Axis, sum_rows: SumRows | None = None) -> PyTree:
        """Return the sums over all replicas along `axis`, added by `sum_rows` if it is given."""
        if sum_rows is None and self.dtype is None:
            return all_reduce(sums, axis)
        plain = REDUCTIONS["float32"]
        if self.dtype is None or not isinstance(sums, StepSums):
            return plain._add_in_parts(sums, axis, sum_rows)
        gradient = self._add_in_parts(sums.gradient, axis, sum_rows)
        return StepSums(gradient, plain.add(sums.weighted, axis, sum_rows))

    def scatter(
        self, leaf: jax.Array, axis: Axis, dim: int, sum_rows: SumRows | None = None
    ) -> jax.Array:
        """Return this replica's part, along `dim`, of the sum that `add` computes."""
        if sum_rows is None and self.dtype is None:
            part: jax.Array = lax.psum_scatter(leaf, axis, scatter_dimension=dim, tiled=True)
            return part
        front = jnp.moveaxis(leaf, dim, 0)
        own = self._own_part(front.reshape(lax.axis_size(axis), -1), axis, sum_rows)
        return jnp.moveaxis(own.reshape(-1, *front.shape[1:]), 0, dim)

    def error(self, roundings: int = 2) -> float:
        """Return the largest error of a total, relative to the sum of its parts' magnitudes.

        Each part is rounded, and then the total: `roundings` times on the way.
        """
        unit = 0.0 if self.dtype is None else float(jnp.finfo(self.dtype).eps) / 2  # type: ignore[no-untyped-call]
        return (1 + unit) ** roundings - 1

    def rounded(self, sums: PyTree) -> PyTree:
        """Round the gradient, if `sums` has one, to the wire dtype."""
        if not isinstance(sums, StepSums):
            return sums
        return dataclasses.replace(sums, gradient=jax.tree.map(self.round, sums.gradient))

    def _add_in_parts(self, sums: PyTree, axis: Axis, sum_rows: SumRows | None) -> PyTree:
        """Return the sums over all replicas. Each replica adds one part of a vector, received
        from all, and sends the result to all: 2 (N - 1) / N of the vector's bytes, as in a ring
        all-reduce.
        """
        replicas = lax.axis_size(axis)

        def add(vector: jax.Array) -> jax.Array:
            own = self._own_part(vector.reshape(replicas, -1), axis, sum_rows)
            return self._send(own, lambda array: lax.all_gather(array, axis, tiled=True))

        return as_vectors(sums, add, replicas)

    def _own_part(self, parts: jax.Array, axis: Axis, sum_rows: SumRows | None) -> jax.Array:
        """Sum `parts[own index]` over all replicas."""
        parts = self._send(parts, lambda array: lax.all_to_all(array, axis, 0, 0))
        if len(parts) == 1:
            return parts[0]
        return jnp.sum(parts, axis=0) if sum_rows is None else sum_rows(self, parts)

    def round(self, leaf: jax.Array) -> jax.Array:
        """Return `leaf` rounded to the wire dtype."""
        if self.dtype is None:
            return leaf
        if jnp.iscomplexobj(leaf):
            return lax.complex(self.round(leaf.real), self.round(leaf.imag))
        kind = jnp.finfo(self.dtype)  # type: ignore[no-untyped-call]
        # XLA may remove a pair of conversions, as it is free to compute more precisely.
        return lax.reduce_precision(leaf, kind.nexp, kind.nmant)

    def _send(self, array: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Move `array` in the wire dtype, as integers, since a backend may widen floats."""
        if self.dtype is None:
            return move(array)
        if jnp.iscomplexobj(array):
            return lax.complex(self._send(array.real, move), self._send(array.imag, move))
        sent = lax.bitcast_convert_type(array.astype(self.dtype), jnp.uint16)
        return lax.bitcast_convert_type(move(sent), self.dtype).astype(array.dtype)


_PLAIN = (Wire("float32"), Wire("bfloat16", jnp.bfloat16))
REDUCTIONS: dict[str, Any] = {each.name: each for each in (*_PLAIN, Coded("int8"), Coded("int4"))}
"""Reductions by name, as in `DataParallel(reduction=...)` and `--reduction`."""


def as_reduction(reduction: "str | Reduction") -> Reduction:
    """Return the reduction of that name, or a custom one; otherwise raise `ConfigError`."""
    if callable(reduction) and hasattr(reduction, "init"):
        return reduction
    otherwise = ", or an object with init(params) and __call__(sums, state, axis)"
    named: Reduction = choose("reduction", reduction, REDUCTIONS, otherwise)
    return named

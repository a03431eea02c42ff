"""The sums of each replica -> the sums of all: the one communication of a step."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from replicax.core.leaves import by_dtype
from replicax.core.mesh import Axis
from replicax.core.objective import StepSums
from replicax.errors import choose

PyTree = Any
Reduce = Callable[[StepSums, PyTree, str | None], tuple[StepSums, PyTree]]
"""`reduce(sums, carried, axis) -> (total, carried)`; `axis` is None in the global view."""


class Reduction(Protocol):
    """Adds the replicas' sums, in the per-replica modes.

    One of your own may compress what it sends. What it must remember from step to step (the
    residual of error feedback, say) is its state: each replica has its own, part of `TrainState`.
    Where it has `error(roundings)` as `Wire` has, `replicax verify` allows as much.
    """

    def init(self, params: PyTree) -> PyTree:
        """Return one replica's state before the first step, a pytree of arrays; `()` for none."""

    def __call__(self, sums: StepSums, state: PyTree, axis: str) -> tuple[StepSums, PyTree]:
        """Return the sums over all replicas, equal on each, and this replica's next state.

        Args:
            sums: over this replica's rows: `gradient`, a pytree as the parameters, and `weighted`,
                the loss and metrics, whose weights are counts of rows.
            state: of this replica.
            axis: the replica axis, as `jax.lax.psum` takes it.
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

    def __call__(self, sums: StepSums, state: PyTree, axis: str) -> tuple[StepSums, PyTree]:
        if self.dtype is None:
            return all_reduce(sums, axis), state
        rounded = _as_vectors(sums.gradient, partial(self._scatter_and_gather, axis=axis))
        return StepSums(rounded, all_reduce(sums.weighted, axis)), state

    def error(self, roundings: int = 2) -> float:
        """Return the largest error of a total, as a share of the sum of its parts' magnitudes.

        In mode `exact` each micro-shard's sums are a part, rounded once and at every level of the
        tree, which makes as many `roundings`.
        """
        unit = 0.0 if self.dtype is None else float(jnp.finfo(self.dtype).eps) / 2  # type: ignore[no-untyped-call]
        return (1 + unit) ** roundings - 1

    def rounded(self, sums: PyTree) -> PyTree:
        """Round the gradient, if `sums` has one, to what can be sent."""
        if self.dtype is None or not isinstance(sums, StepSums):
            return sums
        return dataclasses.replace(sums, gradient=jax.tree.map(self._round, sums.gradient))

    def in_order(self, sums: PyTree, axis: str | None) -> PyTree:
        """Return the sums over all replicas, added by a binary tree; their number is a power of 2.

        Every node of the tree is rounded, so that the bits do not depend on where it is cut.
        """
        if axis is None or lax.axis_size(axis) == 1:
            return sums
        by_tree = partial(_add_in_parts, axis=axis, send=_as_it_is, node=lambda part: part)
        if self.dtype is None or not isinstance(sums, StepSums):
            return _as_vectors(sums, by_tree)
        add = partial(self._scatter_and_gather, axis=axis, tree=True)
        return StepSums(_as_vectors(sums.gradient, add), _as_vectors(sums.weighted, by_tree))

    def _round(self, leaf: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(leaf):
            return lax.complex(self._round(leaf.real), self._round(leaf.imag))
        return leaf.astype(self.dtype).astype(leaf.dtype)

    def _scatter_and_gather(self, vector: jax.Array, axis: str, tree: bool = False) -> jax.Array:
        if jnp.iscomplexobj(vector):
            both = jnp.concatenate([vector.real, vector.imag])
            real, imag = jnp.split(self._scatter_and_gather(both, axis, tree), 2)
            return lax.complex(real, imag)
        return _add_in_parts(vector, axis, self._send, self._round if tree else None)

    def _send(self, array: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Move `array` in the wire's dtype, as integers: a backend may widen floats."""
        sent = lax.bitcast_convert_type(array.astype(self.dtype), jnp.uint16)
        return lax.bitcast_convert_type(move(sent), self.dtype).astype(array.dtype)


REDUCTIONS = {each.name: each for each in (Wire("float32"), Wire("bfloat16", jnp.bfloat16))}
"""By the name that `DataParallel(reduction=...)` and `--reduction` take."""


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


def _as_it_is(array: jax.Array, move: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return move(array)


def _add_in_parts(
    vector: jax.Array,
    axis: str,
    send: Callable[[jax.Array, Callable[[jax.Array], jax.Array]], jax.Array],
    node: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """The sum of all replicas' vectors. Each replica adds one part, of which all send it theirs,
    and sends the result to all: 2 (N - 1) / N of the vector's bytes, as a ring all-reduce moves.

    `send` moves an array by the collective it is given. `node` is applied to each sum of two in a
    binary tree; None adds all at once.
    """
    replicas = lax.axis_size(axis)
    padded = jnp.pad(vector, (0, -vector.size % replicas)).reshape(replicas, -1)
    parts = send(padded, lambda array: lax.all_to_all(array, axis, 0, 0))
    while node is not None and len(parts) > 1:
        parts = node(parts[0::2] + parts[1::2])
    total = parts[0] if len(parts) == 1 else jnp.sum(parts, axis=0)
    return send(total, lambda array: lax.all_gather(array, axis, tiled=True))[: vector.size]


def _as_vectors(sums: PyTree, add: Callable[[jax.Array], jax.Array]) -> PyTree:
    """`add` on one vector of each dtype.

    The barriers keep XLA from computing the gradient inside the loop that packs it, which is slow.
    """

    def added(leaves: list[jax.Array]) -> list[jax.Array]:
        vector, unpack = ravel_pytree(leaves)
        return list(unpack(lax.optimization_barrier(add(vector))))

    return by_dtype(added, lax.optimization_barrier(sums))

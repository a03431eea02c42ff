"""Programs that combine micro-shards: they only move data and add it in a fixed order.

So they round alike however they are compiled: XLA preserves the order of float additions.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh

from replicax.core.ground.in_flight import InFlight
from replicax.core.modes.exact.ordered_reduction import add_in_order, scatter_in_order
from replicax.core.modes.exact.replica_program import as_global
from replicax.core.placement.mesh import ShardDim, options_on, row_axis, sharding_of
from replicax.core.step.base import StepSums
from replicax.core.step.reduction import REDUCTIONS, Wire

MicroShardValues = list[jax.Array]
"""A value of every micro-shard: entry n is the concatenation over devices of their n-th."""

_PLAIN = REDUCTIONS["float32"]

_AT_ONCE = 1 << 25
"""Most bytes of a device's micro-shard sums that are held to be added in one program."""

Local = Callable[[list[list[jax.Array]]], list[Any]]


class CollectivePrograms:
    """Creates the functions that combine the micro-shards of a mesh, `shares` per device."""

    on_demand = False
    """Whether values of a micro-shard are computed when they are first read."""

    def __init__(self, mesh: Mesh, shares: int, in_flight: InFlight) -> None:
        self.mesh, self.shares, self._in_flight = mesh, shares, in_flight

    def mapped(
        self, local: Local, into: Sequence[ShardDim], count: int, out: Sequence[ShardDim]
    ) -> Any:
        """Return a `jax.jit` function of `count` lists of global arrays, laid out as in `into`.

        `local` takes the local arrays of a device and returns a list of them, laid out as in `out`.
        """
        places, results = (
            [sharding_of(self.mesh, own).spec for own in shard_dims] for shard_dims in (into, out)
        )
        return jax.jit(
            jax.shard_map(
                local,
                mesh=self.mesh,
                in_specs=([places] * count,),
                out_specs=results,
                check_vma=False,
            ),
            compiler_options=options_on(self.mesh),
        )

    def cut(self, into: Sequence[ShardDim]) -> Callable[[list[jax.Array]], list[Any]]:
        """Return a function that cuts a device's part of global arrays by micro-shard."""
        split = [dim for dim in into if dim is not None]
        if self.shares == 1 or not split:
            return lambda arrays: [
                array if dim is None else [array] for array, dim in zip(arrays, into, strict=True)
            ]

        def local(lists: list[list[jax.Array]]) -> list[jax.Array]:
            pairs = zip(lists[0], split, strict=True)
            pieces = [_split(array, self.shares, dim) for array, dim in pairs]
            return [piece for each in pieces for piece in each]

        program = self.mapped(local, split, 1, [dim for dim in split for _ in range(self.shares)])

        def cut(arrays: list[jax.Array]) -> list[Any]:
            pairs = list(zip(arrays, into, strict=True))
            found = iter(program([[array for array, dim in pairs if dim is not None]]))
            return [
                array if dim is None else list(itertools.islice(found, self.shares))
                for array, dim in pairs
            ]

        return cut

    def pasted(
        self, into: Sequence[ShardDim]
    ) -> Callable[[list[MicroShardValues]], list[jax.Array]]:
        """Return the inverse of `cut`: a function that concatenates values by device."""
        if self.shares == 1:
            return lambda values: [as_global(array) for [array] in values]

        def local(lists: list[list[jax.Array]]) -> list[jax.Array]:
            each = zip(zip(*lists, strict=True), into, strict=True)
            return [jnp.concatenate(arrays, dim) for arrays, dim in each]

        program = self.mapped(local, into, self.shares, into)
        return lambda values: list(program([list(each) for each in zip(*values, strict=True)]))

    def gathered(
        self, eqns: Sequence[JaxprEqn]
    ) -> Callable[[list[MicroShardValues]], list[jax.Array]]:
        """Return a function that gathers the operands of some `gather_p` from all shards."""
        dims = [eqn.params["dim"] for eqn in eqns]

        def local(lists: list[list[jax.Array]]) -> list[jax.Array]:
            each = zip(zip(*lists, strict=True), dims, strict=True)
            axis = row_axis(self.mesh)
            return [
                lax.all_gather(jnp.concatenate(arrays, dim), axis, axis=dim, tiled=True)
                for arrays, dim in each
            ]

        program = self.mapped(local, [0] * len(dims), self.shares, [None] * len(dims))
        return lambda values: self.run(program, [list(each) for each in zip(*values, strict=True)])

    def run(self, program: Any, lists: list[list[jax.Array]]) -> list[jax.Array]:
        """Run a program with collectives and return its results."""
        devices = self.mesh.devices
        if devices.size == 1 or devices.flat[0].platform != "cpu":
            return list(program(lists))
        return self._in_flight.meet(lambda: list(program(lists)))

    def summed(self, eqns: Sequence[JaxprEqn]) -> "TreeSum":
        """Return the function that adds the operands of some `sum_p` of all micro-shards."""
        return TreeSum(self, eqns)

    def numbers(self, call: int) -> np.ndarray:
        """Return the number of the micro-shard that each device computes in its n-th call."""
        return np.arange(self.mesh.size, dtype=np.int32) * self.shares + call


class TreeSum:
    """Sums over all micro-shards by a binary tree: neighbours first, then neighbouring pairs."""

    def __init__(self, collectives: CollectivePrograms, eqns: Sequence[JaxprEqn]) -> None:
        self._collectives = collectives
        wires = [eqn.params["wire"] for eqn in eqns for sent in eqn.params["sent"] if sent]
        self._wire: Wire = wires[0] if wires else _PLAIN  # a step has only one
        self._sent: list[bool] = [each for eqn in eqns for each in eqn.params["sent"]]
        self._dims: list[ShardDim] = [each for eqn in eqns for each in eqn.params["shard_dims"]]
        avals: list[Any] = [var.aval for eqn in eqns for var in eqn.invars]
        self._shapes = [aval.shape for aval in avals]
        into: list[ShardDim] = [0] * len(self._shapes)
        size = collectives.shares * sum(aval.size * aval.dtype.itemsize for aval in avals)
        self._at_once = collectives.shares if size <= _AT_ONCE else 1
        self._pair = collectives.mapped(lambda lists: self._add(*lists), into, 2, into)
        of_all = partial(self._of_all, dims=self._dims)
        self._total = collectives.mapped(of_all, into, self._at_once, self._dims)
        self._cut = collectives.cut(self._dims)

    def __call__(self, compute: Callable[[int], list[jax.Array]]) -> list[Any]:
        """Return the sums, or their values, of `compute(n)` of each device's micro-shard n.

        Large sums are added as soon as they are ready, so that one per level of the tree is held;
        small ones are added in one program with those of other devices.
        """
        held: list[list[jax.Array]] = []
        for number in range(self._collectives.shares):
            held.append(compute(number))
            while number & 1 and self._at_once == 1:
                right = held.pop()
                held.append(self._pair([held.pop(), right]))
                number >>= 1
        return self._cut(self._collectives.run(self._total, held))

    def _of_all(self, lists: list[list[jax.Array]], dims: Sequence[ShardDim]) -> list[jax.Array]:
        """Return the sums over all devices, or this device's part of them along `dims`."""
        while len(lists) > 1:
            lists = [self._add(*each) for each in zip(lists[0::2], lists[1::2], strict=True)]
        pairs = zip(self._rounded(lists[0]), self._shapes, strict=True)
        local = [leaf.reshape(shape) for leaf, shape in pairs]
        axis = row_axis(self._collectives.mesh)
        sent: dict[int, Any] = {}
        others: dict[int, Any] = {}
        for n, leaf in enumerate(local):
            if dims[n] is None:
                (sent if self._sent[n] else others)[n] = leaf
        whole = add_in_order(self._wire, StepSums(sent, others), axis)  # type: ignore[arg-type]
        found: dict[int, Any] = {**whole.gradient, **whole.weighted}
        for n, dim in enumerate(dims):
            if dim is not None:
                wire = self._wire if self._sent[n] else _PLAIN
                found[n] = scatter_in_order(wire, local[n], axis, dim)
        return [found[n] for n in range(len(dims))]

    def _add(self, left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
        pairs = zip(self._rounded(left), self._rounded(right), strict=True)
        return self._rounded([a + b for a, b in pairs])

    def _rounded(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Return `leaves`, with those that are sent rounded to the wire dtype."""
        pairs = zip(leaves, self._sent, strict=True)
        return [self._wire.round(leaf) if sent else leaf for leaf, sent in pairs]


def _split(array: jax.Array, count: int, dim: int) -> list[jax.Array]:
    size = array.shape[dim] // count
    return [lax.slice_in_dim(array, n * size, (n + 1) * size, axis=dim) for n in range(count)]

"""Combine micro-shards with other jobs, which compute some of them, in the same fixed order.

A part is what all devices compute in one call: as many neighbouring micro-shards as there are
devices. This job computes some parts, and others only if it is asked to; so values of a part are
computed on demand, and the arguments of a step keep their memory until all parts are known.
"""

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
from replicax.core.ground.job import Parts, PartsExchange
from replicax.core.ground.leaves import from_host, whole_on_host
from replicax.core.modes.exact.combining_programs import (
    CollectivePrograms,
    MicroShardValues,
    TreeSum,
)
from replicax.core.modes.exact.part_results import PartResults
from replicax.core.modes.exact.replica_program import as_global
from replicax.core.placement.mesh import ShardDim, sharding_of


class ExchangedPrograms(CollectivePrograms):
    """Creates the functions that combine the micro-shards of a mesh with those of other jobs."""

    on_demand = True

    def __init__(
        self, mesh: Mesh, shares: int, in_flight: InFlight, exchange: PartsExchange
    ) -> None:
        super().__init__(mesh, shares, in_flight)
        self.exchange = exchange

    def numbers(self, call: int) -> np.ndarray:
        devices = self.mesh.size
        return np.arange(call * devices, (call + 1) * devices, dtype=np.int32)

    def summed(self, eqns: Sequence[JaxprEqn]) -> TreeSum:
        return _ExchangedSum(self, eqns)

    def cut(self, into: Sequence[ShardDim]) -> Callable[[list[jax.Array]], list[Any]]:
        split = [dim for dim in into if dim is not None]
        where = [sharding_of(self.mesh, dim) for dim in split]
        take = jax.jit(partial(_part_of, dims=split, count=self.shares), out_shardings=where)

        def cut(arrays: list[jax.Array]) -> list[Any]:
            pairs = list(zip(arrays, into, strict=True))
            given = [array for array, dim in pairs if dim is not None]
            results = PartResults(
                lambda part: list(take(given, np.int32(part))), self.shares, range(len(given))
            )
            found = iter(results.on_demand())
            return [array if dim is None else next(found) for array, dim in pairs]

        return cut

    def pasted(
        self, into: Sequence[ShardDim]
    ) -> Callable[[list[MicroShardValues]], list[jax.Array]]:
        where = [sharding_of(self.mesh, dim) for dim in into]
        pairs = list(enumerate(into))
        join = jax.jit(
            lambda lists: [jnp.concatenate(lists[n], dim) for n, dim in pairs], out_shardings=where
        )
        return lambda values: list(join([list(each) for each in values]))

    def gathered(
        self, eqns: Sequence[JaxprEqn]
    ) -> Callable[[list[MicroShardValues]], list[jax.Array]]:
        dims, where = [eqn.params["dim"] for eqn in eqns], sharding_of(self.mesh, None)

        def gather(values: list[MicroShardValues]) -> list[jax.Array]:
            def compute(part: int) -> list[np.ndarray]:
                found = [whole_on_host(as_global(each[part])) for each in values]
                pairs, count = zip(found, dims, strict=True), self.mesh.size
                # Along dim 0 lie the pieces of all devices, which belong along `dim`.
                return [np.concatenate(np.split(array, count), dim) for array, dim in pairs]

            each = self.exchange(Parts(self.shares, compute, None, _itself, _itself))
            joined = zip(zip(*each, strict=True), dims, strict=True)
            return [from_host(np.concatenate(arrays, dim), where) for arrays, dim in joined]

        return gather


class _ExchangedSum(TreeSum):
    """Sums over all micro-shards by a binary tree, some subtrees of which other jobs compute."""

    def __init__(self, programs: ExchangedPrograms, eqns: Sequence[JaxprEqn]) -> None:
        super().__init__(programs, eqns)
        whole: list[ShardDim] = [None] * len(self._dims)
        of_all = partial(self._of_all, dims=whole)
        self._part = programs.mapped(of_all, [0] * len(whole), 1, whole)
        self._neighbours = programs.mapped(lambda lists: self._add(*lists), whole, 2, whole)
        self._exchange, self._where = programs.exchange, sharding_of(programs.mesh, None)
        self._count = programs.shares

    def __call__(self, compute: Callable[[int], list[jax.Array]]) -> list[Any]:
        def part(number: int) -> list[jax.Array]:
            return self._collectives.run(self._part, [compute(number)])

        def add(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
            return list(self._neighbours([left, right]))

        def placed(arrays: list[np.ndarray]) -> list[jax.Array]:
            return [from_host(array, self._where) for array in arrays]

        [total] = self._exchange(Parts(self._count, part, add, jax.device_get, placed))
        return self._cut(total)


def _itself(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return arrays


def _part_of(
    arrays: list[jax.Array], number: jax.Array, *, dims: Sequence[int], count: int
) -> list[jax.Array]:
    """Return the part of each array that the devices compute together, along its dim."""
    return [
        lax.dynamic_slice_in_dim(
            array, number * (array.shape[dim] // count), array.shape[dim] // count, dim
        )
        for array, dim in zip(arrays, dims, strict=True)
    ]

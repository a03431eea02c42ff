"""All-gather each sharded parameter where the loss uses it, and no earlier.

The loss is traced with whole parameters and evaluated with sharded ones. A parameter is
all-gathered where it is used, and again in the backward pass, which reduce-scatters its gradient
immediately; one used several times is all-gathered once and kept. A scan over stacked layers
all-gathers one layer at a time. The loss and the model, of any kind, need no changes.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec

from replicax.core.ground.leaves import PyTree
from replicax.core.ground.precision import Precision, to_sum
from replicax.core.jaxprs.jaxpr import (
    CALLS,
    REMATS,
    bind_eqn,
    called,
    evaluate_jaxpr,
    of_scan,
    variables,
)

_Result = TypeVar("_Result")

_LOOPS = {"scan", "while", "cond"}
_MOVES = {"transpose", "reshape", "broadcast_in_dim", "convert_element_type", "squeeze", "copy"}
"""Unary primitives that only move a parameter, which is all-gathered where the result is used."""


@dataclasses.dataclass(frozen=True)
class ShardedParameter:
    """Sharding of one parameter over the replicas, and how to all-gather it."""

    sharding: NamedSharding
    axis: str
    """Mesh axis over which it is sharded."""
    manual: bool
    """Whether the code sees one replica's shard, not the whole array partitioned by XLA."""
    dtype: Any
    """Dtype of the computation."""

    @property
    def dim(self) -> int:
        return list(self.sharding.spec).index(self.axis)

    def of_layer(self) -> "ShardedParameter":
        """Return the sharding of one layer of a stack."""
        spec = PartitionSpec(*self.sharding.spec[1:])
        return dataclasses.replace(self, sharding=NamedSharding(self.sharding.mesh, spec))

    def whole_shape(self, part: jax.Array) -> jax.ShapeDtypeStruct:
        """Return the shape of the whole array, in the computation's dtype."""
        sizes = list(part.shape)
        if self.manual:
            sizes[self.dim] *= self.sharding.mesh.shape[self.axis]
        return jax.ShapeDtypeStruct(tuple(sizes), self.dtype)


@dataclasses.dataclass(frozen=True)
class Gathering:
    """Evaluate a loss written for whole parameters on sharded ones."""

    shardings: PyTree
    """`NamedSharding`s of the parameters."""
    axis: str
    """Mesh axis over which they are sharded."""
    manual: bool
    """Whether the code sees one replica's shards."""

    def __call__(
        self, function: Callable[[PyTree], _Result], params: PyTree, precision: Precision
    ) -> _Result:
        """Return `function` of the whole parameters in the compute dtype of `precision`.

        Parameters are cast before the all-gather, gradients after the reduce-scatter.
        """
        leaves, structure = jax.tree.flatten(params)
        shardings = jax.tree.leaves(self.shardings)
        inputs = [self._input(*pair, precision) for pair in zip(leaves, shardings, strict=True)]
        whole = [each.shape if isinstance(each, _Split) else jax.typeof(each) for each in inputs]
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(
            jax.tree.unflatten(structure, whole)
        )
        found = _evaluate(closed, inputs, in_loop=False)
        result: _Result = jax.tree.unflatten(jax.tree.structure(shapes), found)
        return result

    def _input(self, leaf: jax.Array, sharding: NamedSharding, precision: Precision) -> Any:
        if self.axis not in sharding.spec:
            return precision.to_compute(leaf)
        dtype = jax.eval_shape(precision.to_compute, leaf).dtype
        return _Split(leaf, ShardedParameter(sharding, self.axis, self.manual, dtype))


@dataclasses.dataclass(frozen=True)
class _Split:
    """A parameter not yet all-gathered, and the moves to apply afterwards."""

    part: jax.Array
    place: ShardedParameter
    moves: tuple[JaxprEqn, ...] = ()

    @property
    def shape(self) -> jax.ShapeDtypeStruct:
        return self.place.whole_shape(self.part)

    @cached_property
    def whole(self) -> jax.Array:
        value = _gathered(self.part, self.place)
        for move in self.moves:
            [value] = bind_eqn(move, [value])
        return value


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gathered(part: jax.Array, place: ShardedParameter) -> jax.Array:
    """Cast, then all-gather the part; its gradient is reduce-scattered, then cast."""
    part = part.astype(place.dtype)
    if place.manual:
        gathered: jax.Array = lax.all_gather(part, place.axis, axis=place.dim, tiled=True)
        return gathered
    kept = (None if entry == place.axis else entry for entry in place.sharding.spec)
    where = NamedSharding(place.sharding.mesh, PartitionSpec(*kept))
    whole: jax.Array = lax.with_sharding_constraint(part, where)
    return whole


def _backward(place: ShardedParameter, like: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    wide = to_sum(gradient)
    if place.manual:
        summed = lax.psum_scatter(wide, place.axis, scatter_dimension=place.dim, tiled=True)
    else:
        summed = lax.with_sharding_constraint(wide, place.sharding)
    return (summed.astype(like.dtype),)


_gathered.defvjp(lambda part, place: (_gathered(part, place), jnp.zeros((), part.dtype)), _backward)


def _evaluate(closed: ClosedJaxpr, inputs: Sequence[Any], in_loop: bool) -> list[jax.Array]:
    """Evaluate `closed` on `inputs`, some of them sharded."""
    jaxpr = closed.jaxpr
    uses = collections.Counter(
        variables([*(atom for eqn in jaxpr.eqns for atom in eqn.invars), *jaxpr.outvars])
    )

    def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        pairs = zip(eqn.invars, values, strict=True)
        # A parameter with several uses is all-gathered once, and kept until its last use.
        some = [v.whole if isinstance(v, _Split) and uses[atom] > 1 else v for atom, v in pairs]
        return _apply(eqn, some, in_loop)

    return _all_whole(evaluate_jaxpr(closed, inputs, apply, lambda value: value))


def _apply(eqn: JaxprEqn, values: list[Any], in_loop: bool) -> list[Any]:
    """Apply an equation; a parameter that it only moves stays sharded."""
    name, split = eqn.primitive.name, [each for each in values if isinstance(each, _Split)]
    if not split:
        return bind_eqn(eqn, values)
    if name in _MOVES and len(values) == 1:
        return [dataclasses.replace(split[0], moves=(*split[0].moves, eqn))]
    if name in CALLS:
        return _evaluate(called(eqn), values, in_loop)
    if name in REMATS:
        settings = {key: eqn.params[key] for key in ("policy", "prevent_cse")}
        return _with_parts(partial(_evaluate, called(eqn), in_loop=in_loop), values, settings)
    if name == "scan":
        return _scan(eqn, values)
    if name in _LOOPS:
        return bind_eqn(eqn, _all_whole(values))
    settings = {"policy": None, "prevent_cse": not in_loop}
    return _with_parts(lambda values: bind_eqn(eqn, _all_whole(values)), values, settings)


def _with_parts(
    function: Callable[[list[Any]], Any], values: list[Any], settings: dict[str, Any]
) -> list[Any]:
    """Return `function(values)` with shards, not all-gathered arrays, as residuals."""

    def of_arrays(arrays: list[jax.Array]) -> Any:
        given = [
            dataclasses.replace(value, part=array) if isinstance(value, _Split) else array
            for value, array in zip(values, arrays, strict=True)
        ]
        return function(given)

    arrays = [value.part if isinstance(value, _Split) else value for value in values]
    found: list[Any] = jax.checkpoint(of_arrays, **settings)(arrays)
    return found


def _scan(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
    """Apply a scan whose body all-gathers stacked layers one at a time."""
    params = eqn.params
    fixed, begun, over = of_scan(params, values)
    consts, carry = _all_whole(fixed), _all_whole(begun)
    stacks = [
        # A stack sharded along its layers cannot be all-gathered one layer at a time.
        each.whole if isinstance(each, _Split) and (not each.place.dim or each.moves) else each
        for each in over
    ]
    layers = {n: each for n, each in enumerate(stacks) if isinstance(each, _Split)}

    def body(carry: list[jax.Array], rows: list[jax.Array]) -> tuple[list[Any], list[Any]]:
        of_layer: list[Any] = list(rows)
        for number, stack in layers.items():
            of_layer[number] = _Split(rows[number], stack.place.of_layer())
        results = _evaluate(params["jaxpr"], [*consts, *carry, *of_layer], in_loop=True)
        return results[: len(carry)], results[len(carry) :]

    arrays = [each.part if isinstance(each, _Split) else each for each in stacks]
    settings = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = lax.scan(body, carry, arrays, **settings)
    return [*carry, *stacked]


def _all_whole(values: Sequence[Any]) -> list[Any]:
    return [value.whole if isinstance(value, _Split) else value for value in values]

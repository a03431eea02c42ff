"""An update of one replica's part of a state, with the bits that an update of the whole has.

What is computed number by number is computed of the own part. What looks at a whole array, as the
norm of a gradient does, is given the whole array: what that follows from is gathered, and computed
whole as well, as on one device. An operation that is fused with another rounds otherwise than one
that is given the other's result.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import NamedSharding

from replicax.core.accumulate import Apply
from replicax.core.equations import CALLS, bind, each_alone
from replicax.core.mesh import AnyMesh
from replicax.core.models.definition import PyTree


def by_own_part(apply: Apply, mesh: AnyMesh, axis: str, into: PyTree, out: PyTree) -> Apply:
    """Return `apply`, of parts that lie as the shardings `into` and `out` say.

    Args:
        apply: a function of whole arrays.
        mesh: of the replicas.
        axis: over which parts are split.
        into: shardings of its arguments, or one for all of each.
        out: of its results.
    """

    def of_parts(*arguments: PyTree) -> Any:
        def own(*parts: PyTree) -> Any:
            leaves, structure = jax.tree.flatten(parts)
            dims = _dims(into, parts, axis)
            inputs = [_Value(leaf, dim) for leaf, dim in zip(leaves, dims, strict=True)]
            wholes = [_whole_shape(each, axis) for each in inputs]
            closed, shapes = jax.make_jaxpr(apply, return_shape=True)(
                *jax.tree.unflatten(structure, wholes)
            )
            found = _evaluate(closed, inputs, axis)
            wanted = zip(found, _dims(out, shapes, axis), strict=True)
            values = [
                value.gathered(axis) if dim is None else value.part(dim, axis)
                for value, dim in wanted
            ]
            return jax.tree.unflatten(jax.tree.structure(shapes), values)

        specs = [jax.tree.map(lambda where: where.spec, each) for each in (into, out)]
        return jax.shard_map(
            own, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
        )(*arguments)

    return of_parts


def _dims(shardings: PyTree, tree: PyTree, axis: str) -> list[int | None]:
    """For each leaf of `tree` the dim that is split over `axis`."""
    is_one = lambda node: isinstance(node, NamedSharding)  # noqa: E731
    each = jax.tree.leaves(jax.tree.broadcast(shardings, tree, is_leaf=is_one), is_leaf=is_one)
    specs: list[list[Any]] = [list(where.spec) for where in each]
    return [spec.index(axis) if axis in spec else None for spec in specs]


@dataclasses.dataclass
class _Value:
    """An array, or this replica's part of one."""

    array: Any
    dim: int | None = None
    """The dim of which this is a part; None for a whole array."""
    compute: Callable[[], Any] | None = None
    """Computes the whole array from others; None gathers it."""
    fill: Any = None
    """The scalar that all its elements are, if they are."""

    def whole(self, axis: str) -> Any:
        """The whole array."""
        if self.dim is None:
            return self.array
        return self.gathered(axis) if self.compute is None else self.compute()

    def gathered(self, axis: str) -> Any:
        """The whole array, put together from its parts."""
        if self.dim is None:
            return self.array
        return lax.all_gather(self.array, axis, axis=self.dim, tiled=True)

    def part(self, dim: int, axis: str) -> Any:
        """This replica's part of `dim`; of a scalar, all of it."""
        if self.dim == dim or not jnp.ndim(self.array):
            return self.array
        whole = self.whole(axis)
        size = whole.shape[dim] // lax.axis_size(axis)
        if self.fill is not None:
            return jnp.broadcast_to(self.fill, (*whole.shape[:dim], size, *whole.shape[dim + 1 :]))
        return lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * size, size, dim)


def _whole_shape(value: _Value, axis: str) -> jax.ShapeDtypeStruct:
    sizes = list(value.array.shape)
    if value.dim is not None:
        sizes[value.dim] *= lax.axis_size(axis)
    return jax.ShapeDtypeStruct(tuple(sizes), value.array.dtype)


def _evaluate(closed: ClosedJaxpr, inputs: Sequence[_Value], axis: str) -> list[_Value]:
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, map(_Value, closed.consts), strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> _Value:
        return _Value(atom.val) if isinstance(atom, Literal) else known[atom]

    for alone in each_alone(jaxpr):
        [eqn] = alone.eqns
        values = [read(atom) for atom in eqn.invars]
        known.update(zip(eqn.outvars, _apply(alone, values, axis), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(alone: Jaxpr, values: list[_Value], axis: str) -> list[_Value]:
    [eqn] = alone.eqns
    dims = {value.dim for value in values if value.dim is not None}
    if eqn.primitive.name in CALLS:
        return _evaluate(eqn.params["jaxpr"], values, axis)
    wholes = cache(lambda: bind(alone, [value.whole(axis) for value in values]))
    if len(dims) == 1 and _is_elementwise(alone):
        [dim] = dims
        parts = bind(alone, [value.part(dim, axis) for value in values])
        return [_Value(part, dim, partial(_nth, wholes, n)) for n, part in enumerate(parts)]
    fill = None
    if eqn.primitive.name == "broadcast_in_dim" and not jnp.ndim(values[0].array):
        fill = values[0].array
    return [_Value(array, fill=fill) for array in wholes()]


def _nth(arrays: Callable[[], list[Any]], number: int) -> Any:
    return arrays()[number]


def _is_elementwise(alone: Jaxpr) -> bool:
    """Whether each number of a result follows from those in its place, and from scalars."""
    [eqn] = alone.eqns
    if any(isinstance(each, Jaxpr | ClosedJaxpr) for each in jax.tree.leaves(eqn.params)):
        return False
    sides: Any = (eqn.invars, eqn.outvars)
    read, given = ({atom.aval.shape for atom in side} for side in sides)
    return read - {()} == given

"""An update of one replica's part of a state, with the bits that an update of the whole has.

What is computed number by number is computed of the own part. What looks at a whole array, as the
norm of a gradient does, is computed of one that each replica has whole, in the order of one device.
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
from replicax.core.row_rules import BY_ENTRY


class LooksAtWhole(Exception):  # noqa: N818
    """An operation would read an array whole of which each replica has a part."""


def by_own_part(apply: Apply, mesh: AnyMesh, axis: str, into: PyTree, out: PyTree) -> Apply:
    """Return `apply`, of parts that lie as the shardings `into` and `out` say.

    Traced, it raises `LooksAtWhole` where `apply` looks at more than the own part of an array that
    is split.

    Args:
        apply: a function of whole arrays.
        mesh: of the replicas.
        axis: over which parts are split.
        into: shardings of its arguments, or one for all of each.
        out: of its results.
    """

    def own(*parts: PyTree) -> Any:
        leaves, structure = jax.tree.flatten(parts)
        pairs = zip(leaves, _dims(into, parts, axis), strict=True)
        inputs = [_Value(leaf, dim) for leaf, dim in pairs]
        wholes = jax.tree.unflatten(structure, [_whole_shape(each, axis) for each in inputs])
        closed, shapes = jax.make_jaxpr(apply, return_shape=True)(*wholes)
        wanted = zip(_evaluate(closed, inputs, axis), _dims(out, shapes, axis), strict=True)
        values = [value.placed(dim, axis) for value, dim in wanted]
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    specs = [jax.tree.map(lambda where: where.spec, each) for each in (into, out)]
    return jax.shard_map(own, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)


def _dims(shardings: PyTree, tree: PyTree, axis: str) -> list[int | None]:
    """For each leaf of `tree` the dim that is split over `axis`."""
    is_one = lambda node: isinstance(node, NamedSharding)  # noqa: E731
    each = jax.tree.leaves(jax.tree.broadcast(shardings, tree, is_leaf=is_one), is_leaf=is_one)
    specs: list[list[Any]] = [list(where.spec) for where in each]
    return [spec.index(axis) if axis in spec else None for spec in specs]


@dataclasses.dataclass(frozen=True)
class _Value:
    """An array, or this replica's part of one."""

    array: Any
    dim: int | None = None
    """The dim of which this is a part; None for a whole array."""
    compute: Callable[[int], Any] | None = None
    """Computes the part of a dim from parts of what the whole array follows from."""

    def part(self, dim: int, axis: str) -> Any:
        """This replica's part of `dim`; of a scalar, all of it."""
        if self.dim == dim or not jnp.ndim(self.array):
            return self.array
        if self.compute is not None:
            return self.compute(dim)
        size = self.array.shape[dim] // lax.axis_size(axis)
        return lax.dynamic_slice_in_dim(self.array, lax.axis_index(axis) * size, size, dim)

    def placed(self, dim: int | None, axis: str) -> Any:
        """The part of `dim`; the whole array for None."""
        if dim is not None:
            return self.part(dim, axis)
        if self.dim is None:
            return self.array
        return lax.all_gather(self.array, axis, axis=self.dim, tiled=True)


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
    if not dims:
        found = bind(alone, [value.array for value in values])
        again = _in_parts(alone, values, found, axis)
        return [_Value(array, None, again and partial(again, n)) for n, array in enumerate(found)]
    if eqn.primitive.name in CALLS:
        return _evaluate(eqn.params["jaxpr"], values, axis)
    if eqn.primitive.name == "cond":
        return _cond(eqn.params["branches"], values, axis)
    if len(dims) > 1 or not _is_elementwise(alone):
        raise LooksAtWhole(eqn.primitive.name)
    [dim] = dims
    return [_Value(x, dim) for x in bind(alone, [value.part(dim, axis) for value in values])]


def _in_parts(
    alone: Jaxpr, values: list[_Value], found: list[Any], axis: str
) -> Callable[[int, int], Any] | None:
    """Function `(n, dim)` -> part of `found[n]`, from parts of `values`; None if it needs more.

    A part sliced out of the result would be rounded between two operations that XLA fuses.
    """
    [eqn] = alone.eqns
    if eqn.primitive.name == "broadcast_in_dim" and not jnp.ndim(values[0].array):

        def filled(_: int, dim: int) -> Any:
            shape = list(found[0].shape)
            shape[dim] //= lax.axis_size(axis)
            return jnp.broadcast_to(values[0].array, shape)

        return filled
    if not _is_elementwise(alone):
        return None
    return cache(lambda n, dim: bind(alone, [value.part(dim, axis) for value in values])[n])


def _cond(branches: Sequence[ClosedJaxpr], values: list[_Value], axis: str) -> list[_Value]:
    """One of the branches, each of parts; what one of them gives in parts, all do."""
    index, *operands = values

    def of_values(branch: ClosedJaxpr, arrays: list[Any]) -> list[_Value]:
        pairs = zip(arrays, operands, strict=True)
        return _evaluate(branch, [_Value(array, each.dim) for array, each in pairs], axis)

    found: list[list[int | None]] = []

    def dims_of(branch: ClosedJaxpr, arrays: list[Any]) -> None:
        found.append([value.dim for value in of_values(branch, arrays)])

    arrays = [each.array for each in operands]
    for branch in branches:
        jax.eval_shape(partial(dims_of, branch), arrays)
    split = [
        next((dim for dim in dims if dim is not None), None) for dims in zip(*found, strict=True)
    ]

    def run(branch: ClosedJaxpr, arrays: list[Any]) -> list[Any]:
        pairs = zip(of_values(branch, arrays), split, strict=True)
        return [value.placed(dim, axis) for value, dim in pairs]

    taken = lax.switch(index.array, [partial(run, branch) for branch in branches], arrays)
    return [_Value(array, dim) for array, dim in zip(taken, split, strict=True)]


def _is_elementwise(alone: Jaxpr) -> bool:
    """Whether each number of a result follows from those in its place, and from scalars."""
    [eqn] = alone.eqns
    sides: Any = (eqn.invars, eqn.outvars)
    read, given = ({atom.aval.shape for atom in side} for side in sides)
    return eqn.primitive.name in BY_ENTRY and read - {()} == given

"""Update a state in equal pieces; their number is the same on any number of devices.

Elementwise operations are computed on one piece. A reduction, such as the norm of a gradient, is
computed per piece and then over all pieces. Any other use of a whole array is rejected.

For example, an update of 8 weights in 4 pieces. `w` is whole on all devices; of `m` and `g` each
micro-shard has two entries. The update is traced on shapes of whole arrays, and evaluated:

    def update(w, m, g):
        norm = jnp.sqrt(jnp.sum(g * g))
        m = m * 0.9 + g / norm
        return w * 0.99 - m, m

    mul g g               [2]    a piece: elementwise
    reduce_sum            []     whole: the piece's sum, gathered from all micro-shards, [4], added
    sqrt                  []     whole, as its operand is
    mul m 0.9, div, add   [2]    a piece; a scalar operand is the same for all pieces
    mul w 0.99            [8]    whole
    sub                   [2]    a piece: `mul w 0.99` is computed again, on two entries of `w`
    new w, new m                 gathered to [8], since the layout has `w` whole; the piece as it is

The whole product `mul w 0.99` is dead code then. `split_trace` cuts this into a program with the
sum of a piece, the gather, a program with the rest, and the gather of `w`.

`jnp.sort(m)`, `g @ g` and `m.at[0].set(0)` raise `LooksAtWhole`, which names the primitives `sort`,
`dot_general` and `scatter`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive

from replicax.core.ground.leaves import PyTree
from replicax.core.jaxprs.jaxpr import CALLS, bind_eqn, called, evaluate_jaxpr
from replicax.core.jaxprs.row_rules import BY_ENTRY
from replicax.core.modes.exact.micro_shard_primitives import gather_micro_shards
from replicax.core.placement.matrix_owners import Moves, OwnersWork, performing
from replicax.core.placement.mesh import ShardDim
from replicax.core.step.base import Apply

_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {
    "reduce_sum": jnp.sum,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_and": jnp.all,
    "reduce_or": jnp.any,
}


class LooksAtWhole(Exception):  # noqa: N818
    """Raised if an operation needs the whole of an array that is split into pieces."""


@dataclasses.dataclass(frozen=True)
class MicroShard:
    """A micro-shard: the rows, and the piece of each split array, that are computed together."""

    number: Any
    """int32 scalar, counted from 0."""
    count: int
    """Number of pieces."""

    def shape(self, shape: Sequence[int], dim: ShardDim) -> tuple[int, ...]:
        """Return the shape of a piece of an array with this `shape`."""
        return tuple(n // self.count if at == dim else n for at, n in enumerate(shape))

    def shapes(self, tree: Any, dims: Sequence[ShardDim]) -> Any:
        """Return the shapes of a piece of each array in `tree`."""
        leaves, structure = jax.tree.flatten(tree)
        pairs = zip(leaves, dims, strict=True)
        each = [jax.ShapeDtypeStruct(self.shape(x.shape, dim), x.dtype) for x, dim in pairs]
        return jax.tree.unflatten(structure, each)


owners_p = Primitive("update_of_owners")
"""The `OwnersWork` of owners on whole leaves, of which a piece does its own part."""
owners_p.multiple_results = True


def of_owners(
    work: OwnersWork, gradients: list[jax.Array], params: list[jax.Array], states: list[PyTree]
) -> tuple[list[jax.Array], list[PyTree]]:
    """Do `work` when it is evaluated on a piece."""
    # An optimizer may close over values of this trace, such as a learning rate of its state.
    programs = work.programs(gradients)
    outside = [const for closed, _ in programs.values() for const in closed.consts]
    given, structure = jax.tree.flatten((outside, gradients, params, states))
    shapes = jax.eval_shape(work, gradients, params, states)
    results, after = jax.tree.flatten(shapes)
    avals = tuple(ShapedArray(each.shape, each.dtype) for each in results)
    options = {"work": work, "programs": programs, "structure": structure, "avals": avals}
    return jax.tree.unflatten(after, owners_p.bind(*given, **options))  # type: ignore[no-any-return]


owners_p.def_abstract_eval(lambda *_, avals, **__: list(avals))


def by_pieces(
    apply: Apply, into: Sequence[ShardDim], out: Sequence[ShardDim], piece: MicroShard
) -> Apply:
    """Transform `apply`, a function of whole arrays, to run on one piece of split arrays.

    For the first leaves of the arguments and results, `into` and `out` give the split dim, if any.
    Tracing it raises `LooksAtWhole` if `apply` uses more than one piece of an array.
    """

    def own(*parts: Any) -> Any:
        leaves, structure = jax.tree.flatten(parts)
        pairs = itertools.zip_longest(leaves, into)
        inputs = [_Value(leaf, dim) for leaf, dim in pairs]
        wholes = jax.tree.unflatten(structure, [_whole_shape(each, piece) for each in inputs])
        with performing(of_owners):
            closed, shapes = jax.make_jaxpr(apply, return_shape=True)(*wholes)
        wanted = itertools.zip_longest(_evaluate(closed, inputs, piece), out)
        values = [value.placed(dim, piece) for value, dim in wanted]
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return own


@dataclasses.dataclass(frozen=True)
class _Value:
    """An array, or the piece of it being computed."""

    array: Any
    dim: int | None = None
    """The dim that this is a part of; None for a whole array."""
    compute: Callable[[int], Any] | None = None
    """Computes the part along a dim from parts of the arrays that the whole array depends on."""

    def part(self, dim: int, piece: MicroShard) -> Any:
        """Return this piece along `dim`, or a scalar unchanged."""
        if self.dim == dim or not jnp.ndim(self.array):
            return self.array
        if self.compute is not None:
            return self.compute(dim)
        size = self.array.shape[dim] // piece.count
        return lax.dynamic_slice_in_dim(self.array, piece.number * size, size, dim)

    def placed(self, dim: int | None, piece: MicroShard) -> Any:
        """Return the part along `dim`, or the whole array if it is None."""
        if dim is not None:
            return self.part(dim, piece)
        if self.dim is None:
            return self.array
        return gather_micro_shards(self.array, dim=self.dim, count=piece.count)


def _whole_shape(value: _Value, piece: MicroShard) -> jax.ShapeDtypeStruct:
    sizes = list(value.array.shape)
    if value.dim is not None:
        sizes[value.dim] *= piece.count
    return jax.ShapeDtypeStruct(tuple(sizes), value.array.dtype)


def _evaluate(closed: ClosedJaxpr, inputs: Sequence[_Value], piece: MicroShard) -> list[_Value]:
    return evaluate_jaxpr(closed, inputs, partial(_apply, piece=piece), _Value)


def _at_owners(eqn: JaxprEqn, values: list[_Value], piece: MicroShard) -> list[_Value]:
    """Update the matrices of the owners of a piece."""
    outside, gradients, params, states = jax.tree.unflatten(eqn.params["structure"], values)
    own = lambda slots: _Value(slots).part(0, piece)  # noqa: E731
    moves = Moves(own, own, own, partial(gather_micro_shards, dim=0, count=piece.count))
    whole = [[each.placed(None, piece) for each in some] for some in (outside, gradients, params)]
    updates, states = eqn.params["work"].by_programs(eqn.params["programs"], whole[0])(
        *whole[1:], jax.tree.map(lambda value: value.part(0, piece), states), moves
    )
    after = [_Value(leaf, 0) for leaf in jax.tree.leaves(states)]
    return [*map(_Value, updates), *after]


def _apply(eqn: JaxprEqn, values: list[_Value], piece: MicroShard) -> list[_Value]:
    if eqn.primitive is owners_p:
        return _at_owners(eqn, values, piece)
    dims = {value.dim for value in values if value.dim is not None}
    if not dims:
        # Nothing is split yet, but the result may meet a piece later. It is computed whole, for
        # reductions and results, and `again` computes a part of it, if asked.
        found = bind_eqn(eqn, [value.array for value in values])
        again = _in_parts(eqn, values, found, piece)
        return [_Value(array, None, again and partial(again, n)) for n, array in enumerate(found)]
    if eqn.primitive.name in CALLS:
        return _evaluate(called(eqn), values, piece)
    if eqn.primitive.name == "cond":
        return _cond(eqn.params["branches"], values, piece)
    # Pieces along different dims, as of a matrix and its transpose, hold different entries.
    if len(dims) > 1:
        raise LooksAtWhole(eqn.primitive.name)
    [dim] = dims
    if eqn.primitive.name in _REDUCTIONS:
        return [_reduced(eqn, values[0].array, dim, piece)]
    if not _is_elementwise(eqn):
        raise LooksAtWhole(eqn.primitive.name)
    return [_Value(x, dim) for x in bind_eqn(eqn, [value.part(dim, piece) for value in values])]


def _reduced(eqn: JaxprEqn, array: Any, dim: int, piece: MicroShard) -> _Value:
    """Return a reduction of an array split along `dim`, combining all pieces over that dim."""
    axes = eqn.params["axes"]
    [found] = bind_eqn(eqn, [array])
    # Each entry of a result that keeps the split dim is reduced from entries of one piece.
    if dim not in axes:
        return _Value(found, dim - sum(axis < dim for axis in axes))
    each = gather_micro_shards(found[None], dim=0, count=piece.count)
    return _Value(_REDUCTIONS[eqn.primitive.name](each, axis=0).astype(found.dtype))


def _in_parts(
    eqn: JaxprEqn, values: list[_Value], found: list[Any], piece: MicroShard
) -> Callable[[int, int], Any] | None:
    """Return `(n, dim)` -> part of `found[n]` from parts of `values`; None if it needs more.

    Slicing the result instead would round between two operations that XLA fuses.
    """
    if eqn.primitive.name == "broadcast_in_dim" and not jnp.ndim(values[0].array):
        shape = found[0].shape
        return lambda _, dim: jnp.broadcast_to(values[0].array, piece.shape(shape, dim))
    if not _is_elementwise(eqn):
        return None
    return cache(lambda n, dim: bind_eqn(eqn, [value.part(dim, piece) for value in values])[n])


def _cond(branches: Sequence[ClosedJaxpr], values: list[_Value], piece: MicroShard) -> list[_Value]:
    """Evaluate a cond on parts; results that are split in one branch are split in all."""
    index, *operands = values

    def of_values(branch: ClosedJaxpr, arrays: list[Any]) -> list[_Value]:
        pairs = zip(arrays, operands, strict=True)
        return _evaluate(branch, [_Value(array, each.dim) for array, each in pairs], piece)

    # Only evaluating a branch tells which of its results are split, and a traced function cannot
    # return that, so it is put into a list. All branches must agree: where one returns a piece,
    # such as an updated moment, another may return a whole array, such as zeros.
    dims_of_branch: list[list[int | None]] = []

    def dims_of(branch: ClosedJaxpr, arrays: list[Any]) -> None:
        dims_of_branch.append([value.dim for value in of_values(branch, arrays)])

    arrays = [each.array for each in operands]
    for branch in branches:
        jax.eval_shape(partial(dims_of, branch), arrays)
    by_result = zip(*dims_of_branch, strict=True)
    split = [next((dim for dim in dims if dim is not None), None) for dims in by_result]

    def run(is_split: bool, branch: ClosedJaxpr, arrays: list[Any]) -> list[Any]:
        pairs = zip(of_values(branch, arrays), split, strict=True)
        return [value.placed(dim, piece) for value, dim in pairs if (dim is not None) == is_split]

    # Two conds, one of the whole results and one of the pieces: as results of one, whole values
    # would count as different between micro-shards, like everything computed with a piece.
    results = [
        iter(lax.switch(index.array, [partial(run, each, branch) for branch in branches], arrays))
        for each in (False, True)
    ]
    return [_Value(next(results[dim is not None]), dim) for dim in split]


def _is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether an equation is elementwise, apart from scalar operands."""
    sides: Any = (eqn.invars, eqn.outvars)
    read, given = ({atom.aval.shape for atom in side} for side in sides)
    return eqn.primitive.name in BY_ENTRY and read - {()} == given

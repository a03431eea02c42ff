"""Whether each row of a result follows from one row of a batch alone, read from a jaxpr.

What is not known here counts as mixed, so that nothing passes which is not proven.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """How rows lie in an array: one after the other along `dim`, each in `each` entries of it."""

    dim: int
    each: int = 1


Lie = Rows | None
"""None where an array is the same whatever the rows hold."""
MIXED = Rows(-1)
"""Rows may have met."""
GATHERED = "rows_gathered_already"
"""Name of the function that returns what `gather` does where one device has the whole batch."""
Rule = Callable[[Any, list[Lie], list[Shape], Shape], Lie]


def follow(jaxpr: Jaxpr, inputs: Sequence[Lie]) -> list[Lie]:
    """Return how the rows lie in each output of `jaxpr`, given how they lie in its inputs."""
    known: dict[Var, Lie] = dict(zip(jaxpr.invars, inputs, strict=True))

    def lie(atom: Any) -> Lie:
        return None if isinstance(atom, Literal) else known.get(atom)

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _outputs(eqn, [lie(a) for a in eqn.invars]), strict=True))
    return [lie(atom) for atom in jaxpr.outvars]


def gathers(jaxpr: ClosedJaxpr) -> bool:
    """Whether rows are gathered somewhere in `jaxpr`."""
    eqns = (eqn for inner in _all_within(jaxpr) for eqn in inner.jaxpr.eqns)
    return any(eqn.params.get("name") == GATHERED for eqn in eqns)


def holds_number(jaxpr: ClosedJaxpr, numbers: Collection[float]) -> bool:
    """Whether one of `numbers`, in float32, is a floating-point constant somewhere in `jaxpr`."""
    return any(
        np.shape(value) == () and np.asarray(value).dtype.kind == "f" and float(value) in numbers
        for inner in _all_within(jaxpr)
        for value in (
            *inner.consts,
            *(a.val for eqn in inner.jaxpr.eqns for a in eqn.invars if isinstance(a, Literal)),
        )
    )


def _all_within(jaxpr: ClosedJaxpr) -> Iterator[ClosedJaxpr]:
    yield jaxpr
    for eqn in jaxpr.jaxpr.eqns:
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from _all_within(
                    inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
                )


def _outputs(eqn: Any, lies: list[Lie]) -> list[Lie]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if eqn.params.get("name") == GATHERED or not any(lies):
        return [None] * count
    if MIXED in lies:
        return [MIXED] * count
    if name == "optimization_barrier":
        return lies
    if name in _WITH_INNER:
        return _WITH_INNER[name](eqn.params, lies)
    if name in _CALLS:
        return follow(_open(eqn.params[_CALLS[name]]), lies)
    shapes = [atom.aval.shape for atom in eqn.invars]
    out = eqn.outvars[0].aval.shape
    rule = _RULES.get(name)
    return [rule(eqn.params, lies, shapes, out) if rule else MIXED] * count


def _open(jaxpr: ClosedJaxpr | Jaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


def _joined(lies: Sequence[Lie]) -> Lie:
    """How rows lie where arrays meet entry by entry."""
    found = {each for each in lies if each}
    return MIXED if len(found) > 1 else next(iter(found), None)


# Of a primitive: its parameters, how rows lie in its inputs, their shapes, and the output's.


def _by_entry(_params: Any, lies: list[Lie], shapes: list[Shape], out: Shape) -> Lie:
    rows = _joined(lies)
    same = [shape for lie, shape in zip(lies, shapes, strict=True) if lie]
    return rows if rows and all(_size(shape, rows) == _size(out, rows) for shape in same) else MIXED


def _size(shape: Shape, rows: Rows) -> tuple[int, int]:
    return len(shape), shape[rows.dim]


def _broadcast(params: Any, lies: list[Lie], shapes: list[Shape], out: Shape) -> Lie:
    rows = lies[0]
    if rows is None:
        return MIXED
    dim = params["broadcast_dimensions"][rows.dim]
    return Rows(dim, rows.each) if out[dim] == shapes[0][rows.dim] else MIXED


def _reshape(params: Any, lies: list[Lie], shapes: list[Shape], out: Shape) -> Lie:
    rows, shape = lies[0], shapes[0]
    if rows is None or params["dimensions"] is not None:
        return MIXED
    outside, count = math.prod(shape[: rows.dim]), shape[rows.dim] // rows.each
    for dim, size in enumerate(out):
        if math.prod(out[:dim]) == outside and size % count == 0:
            return Rows(dim, size // count)
    return MIXED


def _transpose(params: Any, lies: list[Lie], *_: Any) -> Lie:
    rows = lies[0]
    return rows and Rows(list(params["permutation"]).index(rows.dim), rows.each)


def _without(dims: str) -> Rule:
    """Of what takes away the dims that the parameter `dims` names."""

    def rule(params: Any, lies: list[Lie], *_: Any) -> Lie:
        rows, gone = _joined(lies), params[dims]
        if rows is None or rows.dim in gone:
            return MIXED
        return Rows(rows.dim - sum(dim < rows.dim for dim in gone), rows.each)

    return rule


def _across(dims: str) -> Rule:
    """Of what works along the dims that the parameter `dims` names, and leaves their number."""

    def rule(params: Any, lies: list[Lie], *_: Any) -> Lie:
        rows, along = _joined(lies), params[dims]
        met = rows is None or rows.dim in (along if isinstance(along, tuple) else (along,))
        return MIXED if met else rows

    return rule


def _whole_dim(_params: Any, lies: list[Lie], shapes: list[Shape], out: Shape) -> Lie:
    """Of what takes or changes a part of other dims."""
    rows = _joined(lies)
    sizes = {shape[rows.dim] for lie, shape in zip(lies, shapes, strict=True) if lie and rows}
    return rows if rows and sizes == {out[rows.dim]} else MIXED


def _windows(params: Any, lies: list[Lie], shapes: list[Shape], out: Shape) -> Lie:
    rows = lies[0]
    if rows is None or params["window_dimensions"][rows.dim] != 1:
        return MIXED
    return _whole_dim(params, lies, shapes, out) if not any(params["padding"][rows.dim]) else MIXED


def _pad(params: Any, lies: list[Lie], *_: Any) -> Lie:
    rows = lies[0]
    return MIXED if rows is None or any(params["padding_config"][rows.dim]) else rows


def _top_k(params: Any, lies: list[Lie], shapes: list[Shape], _out: Shape) -> Lie:
    rows, dims = lies[0], len(shapes[0])
    return MIXED if rows is None or rows.dim == params.get("axis", -1) % dims else rows


def _dot(params: Any, lies: list[Lie], shapes: list[Shape], _out: Shape) -> Lie:
    contracted, batched = params["dimension_numbers"]
    free, found = len(batched[0]), []
    for rows, shape, summed, kept in zip(lies, shapes, contracted, batched, strict=True):
        others = [dim for dim in range(len(shape)) if dim not in (*summed, *kept)]
        if rows is not None:
            if rows.dim in summed:
                return MIXED
            dim = list(kept).index(rows.dim) if rows.dim in kept else free + others.index(rows.dim)
            found.append(Rows(dim, rows.each))
        free += len(others)
    return _joined(found)


def _convolution(params: Any, lies: list[Lie], *_: Any) -> Lie:
    numbers, rows = params["dimension_numbers"], lies[0]
    apart = lies[1] is None and params["batch_group_count"] == 1
    if rows is None or not apart or rows.dim != numbers.lhs_spec[0]:
        return MIXED
    return Rows(numbers.out_spec[0], rows.each)


def _gather(params: Any, lies: list[Lie], shapes: list[Shape], out: Shape) -> Lie:
    """Of `x[i]`: a table's entries for each row, some entries of each row, or each row's own."""
    numbers, (table, picked) = params["dimension_numbers"], lies
    by_pick = [dim for dim in range(len(out)) if dim not in numbers.offset_dims]
    if table is None and picked is not None:
        return Rows(by_pick[picked.dim], picked.each) if picked.dim < len(by_pick) else MIXED
    assert table is not None
    if table.dim in numbers.operand_batching_dims:
        place = list(numbers.operand_batching_dims).index(table.dim)
        beside = Rows(numbers.start_indices_batching_dims[place], table.each)
        return Rows(by_pick[beside.dim], table.each) if picked in (None, beside) else MIXED
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if picked is not None or table.dim in gone:
        return MIXED
    if params["slice_sizes"][table.dim] != shapes[0][table.dim]:
        return MIXED
    left = [dim for dim in range(len(shapes[0])) if dim not in gone]
    return Rows(numbers.offset_dims[left.index(table.dim)], table.each)


_BY_ENTRY = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not
    or population_count pow pvary real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sharding_constraint sign sin sinh sqrt square
    stop_gradient sub tan tanh xor"""
_REDUCING = (
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
)
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_BY_ENTRY.split(), _by_entry),
    **dict.fromkeys(_REDUCING.split(), _without("axes")),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _across("axis")),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice", "slice"), _whole_dim),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _windows),
    "broadcast_in_dim": _broadcast,
    "concatenate": _across("dimension"),
    "conv_general_dilated": _convolution,
    "dot_general": _dot,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _across("dimensions"),
    "sort": _across("dimension"),
    "split": _across("axis"),
    "squeeze": _without("dimensions"),
    "top_k": _top_k,
    "transpose": _transpose,
}


# What calls other jaxprs, in its own way.


def _scan(params: Any, lies: list[Lie]) -> list[Lie]:
    consts, carried = params["num_consts"], params["num_carry"]
    fixed, carry, over = lies[:consts], lies[consts:][:carried], lies[consts + carried :]
    if any(each and each.dim == 0 for each in over):
        return [MIXED] * len(_open(params["jaxpr"]).outvars)
    steps = [each and Rows(each.dim - 1, each.each) for each in over]
    carry, ys = _repeated(
        lambda carry: follow(_open(params["jaxpr"]), [*fixed, *carry, *steps]), carry
    )
    stacked = [each if each in (None, MIXED) else Rows(each.dim + 1, each.each) for each in ys]
    return [*carry, *stacked]


def _while(params: Any, lies: list[Lie]) -> list[Lie]:
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    body, carry = lies[of_cond:][:of_body], lies[of_cond + of_body :]
    carry, _ = _repeated(lambda carry: follow(_open(params["body_jaxpr"]), [*body, *carry]), carry)
    goes_on = follow(_open(params["cond_jaxpr"]), [*lies[:of_cond], *carry])
    return [MIXED] * len(carry) if any(goes_on) else carry


def _repeated(
    body: Callable[[list[Lie]], list[Lie]], carry: list[Lie]
) -> tuple[list[Lie], list[Lie]]:
    """The carry that `body` leaves as it is, and what it returns beside it."""
    while True:
        after = body(carry)
        joined = [_joined(pair) for pair in zip(carry, after[: len(carry)], strict=True)]
        if joined == carry:
            return carry, after[len(carry) :]
        carry = joined


def _cond(params: Any, lies: list[Lie]) -> list[Lie]:
    which, *operands = lies
    branches = [follow(_open(branch), operands) for branch in params["branches"]]
    return [MIXED if which else _joined(each) for each in zip(*branches, strict=True)]


_CALLS = {
    **dict.fromkeys(("checkpoint", "closed_call", "jit", "pjit", "remat", "remat2"), "jaxpr"),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), "call_jaxpr"),
}
_WITH_INNER = {"scan": _scan, "while": _while, "cond": _cond}

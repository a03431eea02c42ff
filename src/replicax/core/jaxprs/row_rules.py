"""Rules, one per primitive, that locate the rows of its inputs in its output, if still separate.

For example, for rows `x` of shape `[8, 3]`, which are `Rows(0)`, weights `w` of shape `[3, 2]`,
which are None, and `h = jnp.tanh(x @ w)`:

    h                      dot_general, tanh   [8, 2]   Rows(0)
    jnp.sum(h, axis=1)     reduce_sum          [8]      Rows(0)           each row by itself
    h.T                    transpose           [2, 8]   Rows(1)
    h.reshape(-1)          reshape             [16]     Rows(0, each=2)   2 entries, side by side
    h.T.reshape(-1)        reshape             [16]     MIXED             2 entries, 8 apart
    h[::-1]                rev                 [8, 2]   MIXED             row 0 is where row 7 was
    jnp.sort(h, axis=1)    sort                [8, 2]   Rows(0)
    jnp.sort(h, axis=0)    sort                [8, 2]   MIXED             compares rows
    h @ h.T                dot_general         [8, 8]   MIXED             rows along both dims

A rule may call rows mixed that are separate, as those of `h[::-1]`: then symbols decide
(`row_symbols`), or it is an error. The opposite would be another number, without an error; so a
rule returns a place only for the cases that it checks, and all others are `MIXED`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

Dims = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The placement of rows in an array: consecutive along `dim`, `each` entries per row."""

    dim: int
    each: int = 1
    power: float = 0
    """The entries are multiplied by the number of rows to this power."""


_Place = Rows | None
"""None if an array does not depend on the rows."""
MIXED = Rows(-1)
"""Rows may have been mixed. True, unlike None: a value that depends on rows, wherever they are."""
_Rule = Callable[[Any, list[_Place], list[Dims], Dims], _Place]


def joined(places: Sequence[_Place]) -> _Place:
    """Return the placement of rows in an elementwise combination of arrays."""
    found = {each for each in places if each}
    return MIXED if len(found) > 1 else next(iter(found), None)


# Arguments: a primitive's parameters, row placements in its inputs, their shapes, output shape.


def _by_entry(_params: Any, places: list[_Place], shapes: list[Dims], out: Dims) -> _Place:
    rows = joined(places)
    same = [shape for place, shape in zip(places, shapes, strict=True) if place]
    return rows if rows and all(_size(shape, rows) == _size(out, rows) for shape in same) else MIXED


def _size(shape: Dims, rows: Rows) -> tuple[int, int]:
    return len(shape), shape[rows.dim]


def _broadcast(params: Any, places: list[_Place], shapes: list[Dims], out: Dims) -> _Place:
    rows = places[0]
    if rows is None:
        return MIXED
    dim = params["broadcast_dimensions"][rows.dim]
    return Rows(dim, rows.each) if out[dim] == shapes[0][rows.dim] else MIXED


def _reshape(params: Any, places: list[_Place], shapes: list[Dims], out: Dims) -> _Place:
    # Rows stay together if the dims before that of the rows have the same product as before, and
    # that dim a whole number of entries per row.
    rows, shape = places[0], shapes[0]
    if rows is None or params["dimensions"] is not None:
        return MIXED
    outside, count = math.prod(shape[: rows.dim]), shape[rows.dim] // rows.each
    for dim, size in enumerate(out):
        if math.prod(out[:dim]) == outside and size % count == 0:
            return Rows(dim, size // count)
    return MIXED


def _transpose(params: Any, places: list[_Place], *_: Any) -> _Place:
    rows = places[0]
    return rows and Rows(list(params["permutation"]).index(rows.dim), rows.each)


def _without(dims: str) -> _Rule:
    """Return the rule of a primitive that removes the dims in its parameter `dims`."""

    def rule(params: Any, places: list[_Place], *_: Any) -> _Place:
        rows, gone = joined(places), params[dims]
        if rows is None or rows.dim in gone:
            return MIXED
        return Rows(rows.dim - sum(dim < rows.dim for dim in gone), rows.each)

    return rule


def _across(dims: str) -> _Rule:
    """Return the rule of a primitive that mixes along, but keeps, the dims in parameter `dims`."""

    def rule(params: Any, places: list[_Place], *_: Any) -> _Place:
        rows, along = joined(places), params[dims]
        met = rows is None or rows.dim in (along if isinstance(along, tuple) else (along,))
        return MIXED if met else rows

    return rule


def _whole_dim(_params: Any, places: list[_Place], shapes: list[Dims], out: Dims) -> _Place:
    """Rule of a primitive that slices or updates other dims."""
    rows = joined(places)
    sizes = {shape[rows.dim] for shape in shapes if rows and len(shape) == len(out)}
    return rows if rows and sizes == {out[rows.dim]} else MIXED


def _attention(_params: Any, places: list[_Place], *_: Any) -> _Place:
    """Rule of attention in one kernel: rows of the batch dim."""
    rows = joined(places)
    return rows if rows and rows.dim == 0 else MIXED


def _custom_call(params: Any, places: list[_Place], shapes: list[Dims], out: Dims) -> _Place:
    """Rule of a kernel of another package: that of its target, if known."""
    rule = _CUSTOM_CALLS.get(params["target_name"])
    return rule(params, places, shapes, out) if rule else MIXED


def _windows(params: Any, places: list[_Place], shapes: list[Dims], out: Dims) -> _Place:
    rows = places[0]
    if (
        rows is None
        or params["window_dimensions"][rows.dim] != 1
        or any(params["padding"][rows.dim])
    ):
        return MIXED
    return _whole_dim(params, places, shapes, out)


def _pad(params: Any, places: list[_Place], *_: Any) -> _Place:
    rows = places[0]
    return MIXED if rows is None or any(params["padding_config"][rows.dim]) else rows


def _top_k(params: Any, places: list[_Place], shapes: list[Dims], _out: Dims) -> _Place:
    rows, dims = places[0], len(shapes[0])
    return MIXED if rows is None or rows.dim == params.get("axis", -1) % dims else rows


def _dot(params: Any, places: list[_Place], shapes: list[Dims], _out: Dims) -> _Place:
    # Dims of the result: the batch dims, the free ones of the left operand, those of the right one.
    # `free` is where those of the current operand begin.
    contracted, batched = params["dimension_numbers"]
    free, found = len(batched[0]), []
    for rows, shape, summed, kept in zip(places, shapes, contracted, batched, strict=True):
        others = [dim for dim in range(len(shape)) if dim not in (*summed, *kept)]
        if rows is not None:
            if rows.dim in summed:
                return MIXED
            dim = list(kept).index(rows.dim) if rows.dim in kept else free + others.index(rows.dim)
            found.append(Rows(dim, rows.each))
        free += len(others)
    return joined(found)


def _matrices(_params: Any, places: list[_Place], shapes: list[Dims], _out: Dims) -> _Place:
    """Rule of linear algebra on the last two dims."""
    rows = joined(places)
    return rows if rows and all(rows.dim < len(shape) - 2 for shape in shapes) else MIXED


def _convolution(params: Any, places: list[_Place], *_: Any) -> _Place:
    numbers, rows = params["dimension_numbers"], places[0]
    apart = places[1] is None and params["batch_group_count"] == 1
    if rows is None or not apart or rows.dim != numbers.lhs_spec[0]:
        return MIXED
    return Rows(numbers.out_spec[0], rows.each)


def _gather(params: Any, places: list[_Place], shapes: list[Dims], out: Dims) -> _Place:
    """Rule of `x[i]`: table entries per row, some entries of each row, or indices per row."""
    numbers, (table, picked) = params["dimension_numbers"], places
    by_pick = [dim for dim in range(len(out)) if dim not in numbers.offset_dims]
    if table is None and picked is not None:
        return Rows(by_pick[picked.dim], picked.each) if picked.dim < len(by_pick) else MIXED
    assert table is not None
    if table.dim in numbers.operand_batching_dims:
        position = list(numbers.operand_batching_dims).index(table.dim)
        beside = Rows(numbers.start_indices_batching_dims[position], table.each)
        return Rows(by_pick[beside.dim], table.each) if picked in (None, beside) else MIXED
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if picked is not None or table.dim in gone:
        return MIXED
    if params["slice_sizes"][table.dim] != shapes[0][table.dim]:
        return MIXED
    left = [dim for dim in range(len(shapes[0])) if dim not in gone]
    return Rows(numbers.offset_dims[left.index(table.dim)], table.each)


def _scatter(params: Any, places: list[_Place], shapes: list[Dims], out: Dims) -> _Place:
    """Rule of `x.at[i].set(y)`: all rows of a window, or each row by itself."""
    numbers, (rows, picked, new) = params["dimension_numbers"], places
    inside = [dim for dim in range(len(shapes[2])) if dim in numbers.update_window_dims]
    beside = [dim for dim in range(len(shapes[2])) if dim not in inside]
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [dim for dim in range(len(out)) if dim not in gone]
    if rows is None and new is not None and new.dim in inside:
        rows = Rows(windows[inside.index(new.dim)], new.each)
    if rows is None:
        return MIXED
    if rows.dim in numbers.operand_batching_dims:
        position = list(numbers.operand_batching_dims).index(rows.dim)
        along = numbers.scatter_indices_batching_dims[position]
        own = picked in (None, Rows(along, rows.each))
        return rows if own and new in (None, Rows(beside[along], rows.each)) else MIXED
    if rows.dim not in windows or picked or rows.dim in numbers.scatter_dims_to_operand_dims:
        return MIXED
    dim = inside[windows.index(rows.dim)]
    whole = shapes[2][dim] == out[rows.dim] and new in (None, Rows(dim, rows.each))
    return rows if whole else MIXED


def _triangular(params: Any, places: list[_Place], shapes: list[Dims], out: Dims) -> _Place:
    """Rule of a triangular solver: batches, or rows that are solved by the same matrix."""
    matrix, rows = places
    solved = len(out) - (1 if params["left_side"] else 2)
    if matrix is None and rows is not None and rows.dim == solved:
        return rows
    return _matrices(params, places, shapes, out)


def _stack(params: Any, places: list[_Place], *_: Any) -> _Place:
    rows = joined(places)
    return rows and dataclasses.replace(rows, dim=rows.dim + (rows.dim >= params["axis"]))


def _unstack(params: Any, places: list[_Place], *_: Any) -> _Place:
    rows, gone = places[0], params["axis"]
    if rows is None or rows.dim == gone:
        return MIXED
    return Rows(rows.dim - (gone < rows.dim), rows.each)


def _fourier(params: Any, places: list[_Place], shapes: list[Dims], _out: Dims) -> _Place:
    rows, kept = places[0], len(shapes[0]) - len(params["fft_lengths"])
    return rows if rows and 0 <= rows.dim < kept else MIXED


def _last_dim(_params: Any, places: list[_Place], shapes: list[Dims], _out: Dims) -> _Place:
    rows = joined(places)
    return rows if rows and all(rows.dim < len(shape) - 1 for shape in shapes) else MIXED


_BY_ENTRY = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj
    convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt
    imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi
    name ne neg nextafter not one_minus_square or polynomial population_count pow pvary real
    reduce_precision rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sharding_constraint sign sin sinh
    sqrt square stop_gradient sub tan tanh xor

    bessel_i0e bessel_i1e bitcast_convert_type igamma igamma_grad_a igammac polygamma
    random_gamma_grad regularized_incomplete_beta zeta"""
BY_ENTRY = frozenset(_BY_ENTRY.split())
"""Elementwise primitives."""
_REDUCING = (
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
)
_OF_MATRICES = "cholesky eig eigh lu qr svd"
_CUSTOM_CALLS: dict[str, _Rule] = {
    "dew_flash3_mha_bwd": _attention,
    "dew_flash3_mha_fwd": _attention,
}
"""Rules of the targets of `jax.ffi.ffi_call`."""
ROW_RULES: dict[str, _Rule] = {
    **dict.fromkeys(BY_ENTRY, _by_entry),
    **dict.fromkeys(_REDUCING.split(), _without("axes")),
    **dict.fromkeys(("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum"), _across("axis")),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice", "slice"), _whole_dim),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _windows),
    "broadcast_in_dim": _broadcast,
    "concatenate": _across("dimension"),
    "conv_general_dilated": _convolution,
    **dict.fromkeys(_OF_MATRICES.split(), _matrices),
    "dot_general": _dot,
    "dot_product_attention_bwd_wrapper": _attention,
    "dot_product_attention_fwd_wrapper": _attention,
    "ffi_call": _custom_call,
    "fft": _fourier,
    "gather": _gather,
    "lu_pivots_to_permutation": _last_dim,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _across("dimensions"),
    **dict.fromkeys(("scatter", "scatter-add", "scatter-mul", "scatter-sub"), _scatter),
    **dict.fromkeys(("scatter-max", "scatter-min"), _scatter),
    "sort": _across("dimension"),
    "split": _across("axis"),
    "stack": _stack,
    "unstack": _unstack,
    "squeeze": _without("dimensions"),
    "top_k": _top_k,
    "transpose": _transpose,
    "triangular_solve": _triangular,
}

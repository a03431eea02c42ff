"""Values that depend on the number or order of the rows: sums, means, counts and positions.

`quantity` locates them in the result of an equation; `replicax.core.jaxprs.row_rules` locates plain
rows.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from replicax.core.jaxprs.row_padding import COUNTED, FixedNumber, Padded, joined_padding
from replicax.core.jaxprs.row_rules import MIXED, ROW_RULES, Dims, Rows


@dataclasses.dataclass(frozen=True)
class Total:
    """A sum over all rows, times the number of rows to the `power`: for a mean, -1.

    To a mean, constants may have been added; all rows have equal weights.
    """

    power: float = 0


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A quotient of sums over all rows: a mean with weights, which parts cannot be averaged to."""


@dataclasses.dataclass(frozen=True)
class RowCount:
    """A constant times the number of rows to the `power`."""

    power: float


@dataclasses.dataclass(frozen=True)
class Index:
    """The number of each row along `dim`; if `negative`, whether it is below 0."""

    dim: int
    negative: bool = False


@dataclasses.dataclass(frozen=True)
class Columns:
    """Indices with one row along `dim` and one column per entry of the last dim."""

    dim: int
    each: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """The origin of a value that does not depend on the rows."""

    name: str

    def __bool__(self) -> bool:
        return False


GIVEN = Origin("given")
"""Values derived from the state, or from values without rows in the batch; None for constants."""
FROM_STEP_KEY = Origin("key")
"""Keys derived from the step's: random numbers of each row are drawn from them."""
NUMBER = Origin("number")
"""Values derived from the step number, such as schedules."""

Location = Rows | Padded | Total | Ratio | RowCount | Index | Columns | Origin | FixedNumber | None
"""Falsy for a value that depends on neither rows nor their number: an origin, known, or None."""


def constant(one: Any, two: Any, rows: tuple[int, int]) -> Location:
    """Return the place of a number that is `one` and `two` in traces of different `rows`."""
    if one == two:
        return None
    if not any(map(np.iscomplexobj, (one, two))) and one and two and two / one > 0:
        grown = rows[1] / rows[0]
        power = round(2 * math.log(two / one) / math.log(grown)) / 2
        if abs(two / one / grown**power - 1) < 1e-6:
            return RowCount(power)
    return MIXED


def either(places: Sequence[Location]) -> Location:
    """Return the place of a sum of values, or of a choice between them."""
    if COUNTED in places or any(isinstance(each, Padded) for each in places):
        joined: Location = joined_padding(places)
        return joined
    if any(isinstance(each, FixedNumber) for each in places):
        places = places[:1] if len(set(places)) == 1 else [_unknown(each) for each in places]
    found = {each for each in places if each}
    if len(found) > 1 or (not all(places) and not all(map(_may_shift, found))):
        return MIXED
    return next(iter(found), next((each for each in places if each is not None), None))


def _unknown(place: Location) -> Location:
    return GIVEN if isinstance(place, FixedNumber) else place


def _may_shift(place: Location) -> bool:
    """Whether adding a constant to a value leaves it in its place."""
    return place in (Total(-1), Ratio()) or (isinstance(place, Rows) and not place.power)


def cotangent(place: Location) -> Location:
    """Return the place of the derivative of the sum of all losses by a value in `place`."""
    if not place:
        return Total()
    if isinstance(place, Rows):
        return dataclasses.replace(place, power=-place.power)
    if isinstance(place, Total):
        return RowCount(-place.power) if place.power else None
    return MIXED


def is_plain(place: Location) -> bool:
    """Whether `place` is that of rows, or none."""
    return not place or (isinstance(place, Rows) and not place.power)


def quantity(
    name: str, params: Any, places: list[Location], shapes: list[Dims], out: Dims, zero: bool
) -> Location:
    """Return the place of the result of primitive `name`, given those of its inputs.

    `zero`: whether its second input is the literal 0.
    """
    if any(isinstance(each, Index | Columns) for each in places):
        return _of_index(name, params, places, shapes, out, zero)
    if name == "reduce_sum":
        [place] = places
        if isinstance(place, Rows) and place.dim in params["axes"]:
            return Total(place.power)
    if name == "dot_general":
        return _of_dot(params, places, shapes, out)
    if name == "conv_general_dilated" and all(isinstance(each, Rows) for each in places):
        return _of_convolution(params, places)
    if name in ("mul", "div"):
        return _of_product(places[0], places[1], 1 if name == "mul" else -1, params, shapes, out)
    if name in ("add", "add_any", "sub", "select_n", "concatenate"):
        found = either(places)
        if isinstance(found, Rows) and found != MIXED:
            return _along(name, params, places, shapes, out, found.power)
        return MIXED if name == "select_n" and places[0] else found
    if name in _DEGREES and isinstance(place := places[0], Rows):
        degree = params["y"] if name == "integer_pow" else _DEGREES[name]
        return _along(name, params, places, shapes, out, degree * place.power)
    if name in _COMPARISONS and zero and isinstance(places[0], Rows):
        return _along(name, params, places, shapes, out, 0)
    if name in _LINEAR and len(places) == 1:
        place = places[0]
        if isinstance(place, Rows):
            return _along(name, params, places, shapes, out, place.power)
        return place
    return _along(name, params, places, shapes, out, 0) if all(map(is_plain, places)) else MIXED


def _along(
    name: str, params: Any, places: list[Location], shapes: list[Dims], out: Dims, power: float
) -> Location:
    """Return where the rule of `name` puts rows, now with this `power`."""
    rule = ROW_RULES.get(name)
    if rule is None or MIXED in places or not any(places):
        return MIXED
    plain = [dataclasses.replace(p, power=0) if isinstance(p, Rows) else None for p in places]
    found = rule(params, plain, shapes, out)
    return found if found in (None, MIXED) else dataclasses.replace(found, power=power)


def _of_product(
    left: Location, right: Location, sign: int, params: Any, shapes: list[Dims], out: Dims
) -> Location:
    power = getattr(left, "power", 0) + sign * getattr(right, "power", 0)
    kinds = {type(left), type(right)}
    if Ratio in kinds:
        alone = not right if isinstance(left, Ratio) else not left and sign > 0
        return Ratio() if alone else MIXED
    if kinds == {Total} and sign < 0:
        return Ratio()
    if Total in kinds:
        alone = Rows not in kinds and kinds != {Total} and (sign > 0 or isinstance(left, Total))
        return Total(power) if alone else MIXED
    if Rows in kinds:
        return _along("mul", params, [left, right], shapes, out, power)
    return RowCount(power) if power else None


def _of_dot(params: Any, places: list[Location], shapes: list[Dims], out: Dims) -> Location:
    left, right = places
    power = sum(getattr(each, "power", 0) for each in places)
    if Ratio() in places:
        return MIXED
    if Total in map(type, places):
        return Total(power) if not all(places) or RowCount in map(type, places) else MIXED
    if isinstance(left, Rows) and isinstance(right, Rows) and MIXED not in places:
        of_left, of_right = (list(dims) for dims in params["dimension_numbers"][0])
        if left.dim in of_left and right.dim in of_right and left.each == right.each:
            same = of_left.index(left.dim) == of_right.index(right.dim)
            return Total(power) if same else MIXED
    return _along("dot_general", params, places, shapes, out, power)


def _of_convolution(params: Any, places: list[Location]) -> Location:
    """Return the place of a convolution that sums over rows as features: a gradient of weights."""
    numbers = params["dimension_numbers"]
    features = [numbers.lhs_spec[1], numbers.rhs_spec[1]]
    whole = params["feature_group_count"] == params["batch_group_count"] == 1
    if whole and [getattr(each, "dim", None) for each in places] == features:
        return Total(sum(getattr(each, "power", 0) for each in places))
    return MIXED


def _of_index(
    name: str, params: Any, places: list[Location], shapes: list[Dims], out: Dims, zero: bool
) -> Location:
    """Return the place of a result computed from row numbers, as in `x[jnp.arange(n), labels]`."""
    first = places[0]
    if name == "lt" and isinstance(first, Index) and not places[1] and zero:
        return Index(first.dim, negative=True)
    if name in ("convert_element_type", "broadcast_in_dim") and isinstance(first, Index):
        found = ROW_RULES[name](params, [Rows(first.dim)], shapes, out)
        return found if found in (None, MIXED) else Index(found.dim, first.negative)
    if name == "concatenate" and params["dimension"] == len(out) - 1:
        dims = {place.dim for place in places if isinstance(place, Rows | Index)}
        plain = all(isinstance(each, Index) or is_plain(each) for each in places)
        single = plain and all(shape[-1] == 1 for shape in shapes)
        if single and len(dims) == 1 and MIXED not in places:
            return Columns(dims.pop(), tuple(places))
    if name == "gather" and isinstance(first, Rows) and isinstance(places[1], Columns):
        picked, numbers = places[1], params["dimension_numbers"]
        by_number = [
            table_dim
            for table_dim, place in zip(numbers.start_index_map, picked.each, strict=True)
            if isinstance(place, Index)
        ]
        by_pick = [dim for dim in range(len(out)) if dim not in numbers.offset_dims]
        own = by_number == [first.dim] and first.dim in numbers.collapsed_slice_dims
        if own and first.each == 1 and not first.power and Index(picked.dim) in picked.each:
            return Rows(by_pick[picked.dim])
    if name.startswith("scatter") and isinstance(first, Rows) and isinstance(places[1], Columns):
        return _of_scatter(params, places, shapes)
    return MIXED


def _of_scatter(params: Any, places: list[Location], shapes: list[Dims]) -> Location:
    """Return the place of `x.at[jnp.arange(n), labels].add(y)`."""
    rows, picked, new = places
    assert isinstance(rows, Rows)
    assert isinstance(picked, Columns)
    numbers = params["dimension_numbers"]
    pairs = zip(numbers.scatter_dims_to_operand_dims, picked.each, strict=True)
    by_number = [dim for dim, place in pairs if isinstance(place, Index)]
    beside = [dim for dim in range(len(shapes[2])) if dim not in numbers.update_window_dims]
    own = by_number == [rows.dim] and Index(picked.dim) in picked.each and rows.each == 1
    own &= not rows.power
    return rows if own and (not new or new == Rows(beside[picked.dim])) else MIXED


_LINEAR = {"broadcast_in_dim", "convert_element_type", "copy", "imag", "neg", "real"}
_LINEAR |= {"reduce_precision", "reduce_sum", "reshape", "sharding_constraint", "slice"}
_LINEAR |= {"squeeze", "stop_gradient", "transpose"}
"""Primitives of one array that keep sums sums, whatever the shape."""
_DEGREES = {"abs": 1, "sign": 0, "square": 2, "sqrt": 1 / 2, "rsqrt": -1 / 2, "cbrt": 1 / 3}
_DEGREES |= {"reduce_max": 1, "reduce_min": 1, "integer_pow": 0}
"""Functions `f(n x) = n**degree f(x)` of an array, for the positive number of rows n."""
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
"""With 0, these ask for the sign."""

"""Rules, one per kind of primitive, for what padded rows hold; see `row_padding`.

`padded_output` returns the place of a result, or None where the rules for plain rows decide.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax.numpy as jnp
import numpy as np

from replicax.core.jaxprs.padding_values import is_positive, number_after
from replicax.core.jaxprs.row_counts import GIVEN, Location, RowCount
from replicax.core.jaxprs.row_padding import COUNTED, Along, FixedNumber, Padded
from replicax.core.jaxprs.row_rules import BY_ENTRY, MIXED, ROW_RULES, Rows

_SMALL, _LARGE = 1e-3, 1e4
"""Numbers between these on padding change a sum or a maximum for sure; others may be neutral."""


def padded_output(
    eqn: Any, places: list[Location], out: Any, grown: list[int], rows: int
) -> Location:
    """Return the place of a result with `rows` of which some are padding; None to ask others.

    `grown`: the dims of the result that grow with the number of rows.
    """
    name = eqn.primitive.name
    if COUNTED in places:
        return COUNTED
    if name == "broadcast_in_dim":
        return _broadcast(eqn, places[0], out.shape, grown, rows)
    if not any(isinstance(each, Padded) for each in places):
        return _of_known(eqn, places, out, grown)
    if not all(isinstance(each, Padded | RowCount) or not each for each in places):
        return None  # such as row numbers
    if name in BY_ENTRY:
        return _by_entry(eqn, places, out, grown)
    if name in ("sort", "top_k"):
        return _ordered(eqn, places)
    if name in _NEUTRAL and isinstance(places[0], Padded):
        return _reduced(eqn, places[0])
    if name == "dot_general":
        return _dot(eqn, places, out.shape)
    if name == "scatter-add":
        return _added(eqn, places)
    if name == "concatenate":
        return _concatenated(eqn, places, grown)
    if name in _MOVES:
        return _moved(eqn, places, out.shape)
    return None


def signed(eqn: Any, places: Sequence[Location], out: Any, found: Location) -> Location:
    """Return the place `found`, with whether any entry is negative."""
    if isinstance(found, Padded) or found == GIVEN:
        return is_positive(eqn, places, out, found)
    return found


def _of_known(eqn: Any, places: list[Location], out: Any, grown: list[int]) -> Location:
    """Return a constant that is computed from constants; None where there are other places."""
    name = eqn.primitive.name
    known = [each.value for each in places if isinstance(each, FixedNumber)]
    if grown or not places or len(known) < len(places):
        return None
    if name in _MOVES and len(set(known)) == 1:
        return FixedNumber(known[0])
    value = number_after(eqn, known, out.dtype, fixed=True) if name in BY_ENTRY else None
    return FixedNumber(value) if isinstance(value, float) else None


def _broadcast(
    eqn: Any, place: Location, shape: tuple[int, ...], grown: list[int], rows: int
) -> Location:
    mapped = eqn.params["broadcast_dimensions"]
    if not isinstance(place, Padded | RowCount) and place:
        return None
    if not place and not grown:
        return place if isinstance(place, FixedNumber) else None
    before = place.dims if isinstance(place, Padded) else ()
    dims = [each._replace(dim=mapped[each.dim]) for each in before]
    value = place.value if isinstance(place, FixedNumber) else None
    kept = {each.dim for each in dims}
    dims += [Along(dim, shape[dim] // rows, value) for dim in grown if dim not in kept]
    if not dims:
        return None
    fixed = place is None or isinstance(place, FixedNumber) or getattr(place, "fixed", False)
    return Padded(tuple(sorted(dims)), getattr(place, "power", 0), fixed=fixed)


def _by_entry(eqn: Any, places: list[Location], out: Any, grown: list[int]) -> Location:
    name = eqn.primitive.name
    fixed = all(each is None or isinstance(each, FixedNumber) or _fixed(each) for each in places)
    dims = []
    for dim in grown:
        values: list[float | None] = []
        each = set()
        for atom, place in zip(eqn.invars, places, strict=True):
            along = place.along(dim) if isinstance(place, Padded) else None
            if along is None and atom.aval.shape and atom.aval.shape[dim] != 1:
                return MIXED
            each.update([along.each] if along else [])
            known = place.value if isinstance(place, FixedNumber) else None
            values.append(along.value if along else known)
        if len(each) != 1:
            return MIXED
        value = number_after(eqn, values, out.dtype, fixed)
        if value is MIXED or (value is None and _infinite_gets_lost(name, places, dim)):
            return MIXED
        if value == 0 and None in values and any(map(_elsewhere(dim), places)):
            return MIXED  # 0 times infinity
        dims.append(Along(dim, each.pop(), cast("float | None", value)))
    powers = [getattr(each, "power", 0) for each in places]
    power = powers[0]
    if name in ("mul", "div"):
        power += powers[1] if name == "mul" else -powers[1]
    elif any(powers) and not (name in _HOMOGENEOUS and len(set(powers)) == 1):
        return None
    return Padded(tuple(dims), power, fixed=fixed)


def _fixed(place: Location) -> bool:
    return isinstance(place, Padded) and place.fixed


def _infinite_gets_lost(name: str, places: list[Location], dim: int) -> bool:
    """Whether an infinite number on padding may or may not be there afterwards.

    Other padding is as finite as the real rows that it repeats.
    """
    padded = [each for each in places if isinstance(each, Padded) and not each.fixed]
    along = [each.along(dim) for each in padded]
    return name not in ("max", "min") and any(map(_is_infinite, along))


def _elsewhere(dim: int) -> Callable[[Location], bool]:
    """Return whether a place has an infinite number on padding along another dim."""
    return lambda place: any(
        _is_infinite(each) for each in getattr(place, "dims", ()) if each.dim != dim
    )


def _is_infinite(along: Along | None) -> bool:
    return along is not None and along.value is not None and math.isinf(along.value)


def _lowest(dtype: Any) -> float:
    return float(_limits(dtype).min) if dtype != np.dtype("bool") else 0.0


def _highest(dtype: Any) -> float:
    return float(_limits(dtype).max) if dtype != np.dtype("bool") else 1.0


def _limits(dtype: Any) -> Any:
    of: Any = jnp.finfo if jnp.issubdtype(dtype, np.inexact) else jnp.iinfo
    return of(dtype)


_Neutral = Callable[[float, Any, bool], bool]
_NEUTRAL: dict[str, _Neutral] = {
    "reduce_sum": lambda value, _, __: value == 0,
    "reduce_prod": lambda value, _, __: value == 1,
    "reduce_max": lambda value, of, sign: value <= _lowest(of) or (sign and value <= 0),
    "reduce_min": lambda value, of, _: value >= _highest(of),
    "reduce_or": lambda value, _, __: value == 0,
    "reduce_and": lambda value, _, __: value == 1,
}
"""Whether a number on padding changes no result, given it, the dtype, and if none is negative."""
_NEUTRAL |= {f"cum{name}": _NEUTRAL[f"reduce_{name}"] for name in ("sum", "prod", "max", "min")}
_NEUTRAL |= {"argmax": _NEUTRAL["reduce_max"], "argmin": _NEUTRAL["reduce_min"]}
_NEUTRAL["cumlogsumexp"] = lambda value, *_: value == -math.inf
_LARGE_IS_OPEN = {"reduce_max": -1, "reduce_min": 1, "argmax": -1, "argmin": 1}


def _reduced(eqn: Any, place: Padded) -> Location:
    """Return the place of a sum, a maximum, ... or of a cumulative one, along some dims."""
    name, dtype = eqn.primitive.name, eqn.invars[0].aval.dtype
    axes = eqn.params["axes"] if "axes" in eqn.params else (eqn.params["axis"],)
    keeps, dims = "axes" not in eqn.params, []
    if place.power and name not in ("reduce_sum", "reduce_max", "reduce_min", "cumsum"):
        return MIXED
    for along in place.dims:
        met, value = along.dim in axes, along.value
        if met and (value is None or not _NEUTRAL[name](value, dtype, place.positive)):
            total = name == "reduce_sum" and value is None and len(place.dims) == 1
            return None if total else _wrong(name, value)
        if met and name in ("argmax", "argmin"):
            return MIXED  # a position among rows, of which some are padding
        if not met and not keeps:
            dim = along.dim - sum(axis < along.dim for axis in axes)
            dims.append(along._replace(dim=dim, value=_left(name, value)))
        elif keeps:
            dims.append(along._replace(value=None if met else _left(name, value)))
    if not dims:
        return RowCount(place.power) if place.power else GIVEN
    return Padded(tuple(dims), place.power, fixed=place.fixed)


def _ordered(eqn: Any, places: list[Location]) -> Location:
    """Return the place of sorted entries: of rows if these are not along that dim."""
    dims = len(eqn.invars[0].aval.shape)
    dim = eqn.params.get("dimension", eqn.params.get("axis", -1)) % dims
    for place in places[: eqn.params.get("num_keys", 1)]:
        along = place.along(dim) if isinstance(place, Padded) and not place.positive else None
        if along and along.value is not None:
            return COUNTED if abs(along.value) < _LARGE else MIXED
    return None


def _wrong(name: str, value: float | None) -> Rows:
    """Return whether a number on padding that is not neutral is known to count."""
    if value is None or name.startswith("cum"):
        return MIXED
    if name in _LARGE_IS_OPEN:  # -1e9 is below whatever it is meant for
        return MIXED if value * _LARGE_IS_OPEN[name] >= _LARGE else COUNTED
    return MIXED if math.isinf(value) or abs(value) < _SMALL else COUNTED


def _left(name: str, value: float | None) -> float | None:
    """Return the reduction of several entries that all hold `value`."""
    if value is None or name in ("argmax", "argmin"):
        return None
    same = name not in ("reduce_sum", "cumsum", "reduce_prod", "cumprod", "cumlogsumexp")
    return value if same or value == 0 or math.isinf(value) else None


def _dot(eqn: Any, places: list[Location], out: tuple[int, ...]) -> Location:
    summed, _ = eqn.params["dimension_numbers"]
    if not all(isinstance(each, Padded) or not each for each in places):
        return None
    left, right = places
    if any(map(_elsewhere(-1), places)):
        return MIXED
    for dim, other in zip(*summed, strict=True):
        one = left.along(dim) if isinstance(left, Padded) else None
        two = right.along(other) if isinstance(right, Padded) else None
        if one is None and two is None:
            continue
        if one is None or two is None or one.each != two.each:
            return MIXED
        values = one.value, two.value
        if 0 not in values:
            return MIXED if None in values or any(map(_is_infinite, (one, two))) else COUNTED
    found: dict[int, Along] = {}
    shapes = [atom.aval.shape for atom in eqn.invars]
    for n, place in enumerate(places):
        for along in place.dims if isinstance(place, Padded) else ():
            if along.dim in summed[n]:
                continue
            alone: list[Rows | None] = [None, None]
            alone[n] = Rows(along.dim, along.each)
            dim = ROW_RULES["dot_general"](eqn.params, alone, shapes, out).dim  # type: ignore[union-attr]
            zero = 0.0 if along.value == 0 or (dim in found and found[dim].value == 0) else None
            if dim in found and found[dim].each != along.each:
                return MIXED
            found[dim] = Along(dim, along.each, zero)
    power = sum(getattr(each, "power", 0) for each in places)
    if not found:
        return RowCount(power) if power else GIVEN
    return Padded(tuple(sorted(found.values())), power)


def _added(eqn: Any, places: list[Location]) -> Location:
    """Return the place of an array to which rows are added, wherever indices put them."""
    whole, _, new = places
    inside = eqn.params["dimension_numbers"].update_window_dims
    if whole or not isinstance(new, Padded) or new.power:
        return None
    if any(each.dim in inside for each in new.dims):
        return None
    return GIVEN if all(each.value == 0 for each in new.dims) else MIXED


def _concatenated(eqn: Any, places: list[Location], grown: list[int]) -> Location:
    dims = []
    for dim in grown:
        each = [place.along(dim) if isinstance(place, Padded) else None for place in places]
        if dim == eqn.params["dimension"] or None in each or len({a.each for a in each if a}) != 1:
            return MIXED
        values = {along.value for along in each if along}
        dims.append(each[0]._replace(value=values.pop() if len(values) == 1 else None))  # type: ignore[union-attr]
    powers = {each.power for each in places if isinstance(each, Padded)}
    return Padded(tuple(dims), powers.pop()) if dims and len(powers) == 1 else MIXED


def _moved(eqn: Any, places: list[Location], out: tuple[int, ...]) -> Location:
    """Return the place of an array whose entries are those of another, along other dims."""
    [place, *others], found = places, []
    if any(others) or not isinstance(place, Padded):
        return None
    shapes, rule = [atom.aval.shape for atom in eqn.invars], ROW_RULES[eqn.primitive.name]
    for along in place.dims:
        alone: list[Rows | None] = [Rows(along.dim, along.each), *(None for _ in others)]
        rows = rule(eqn.params, alone, shapes, out)
        if rows is None or rows == MIXED:
            return MIXED
        pads = eqn.primitive.name == "pad" and others != [FixedNumber(along.value or 0)]
        found.append(Along(rows.dim, rows.each, None if pads else along.value))
    return dataclasses.replace(place, dims=tuple(sorted(found)))


_MOVES = {"dynamic_slice", "pad", "reshape", "rev", "slice", "split", "squeeze", "transpose"}
_MOVES |= {"unstack", "reduce_precision"}
_HOMOGENEOUS = {
    "add",
    "add_any",
    "abs",
    "convert_element_type",
    "copy",
    "imag",
    "max",
    "min",
    "neg",
}
_HOMOGENEOUS |= {"real", "stop_gradient", "sub"}

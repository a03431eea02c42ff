"""The number in padded rows after an elementwise operation, and the sign of its results."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from replicax.core.jaxprs.row_counts import GIVEN, Location, Origin
from replicax.core.jaxprs.row_padding import FixedNumber, Padded
from replicax.core.jaxprs.row_rules import MIXED, Rows

POSITIVE = Origin("positive")
"""Values that do not depend on padding, and are not negative."""


def number_after(
    eqn: Any, values: Sequence[float | None], dtype: Any, fixed: bool
) -> float | Rows | None:
    """Return the number of an entry, given those of the inputs, or None if it is not known.

    MIXED where it is no number, or has no finite derivative; `fixed` inputs have none.
    """
    name = eqn.primitive.name
    if jnp.issubdtype(dtype, jax.dtypes.extended) or jnp.issubdtype(dtype, np.complexfloating):
        return None
    if name == "select_n":
        which, *cases = values
        chosen = cases if which is None else [cases[int(which)]]
        return chosen[0] if len(set(chosen)) == 1 else None
    if name == "div" and values[1] == 0 and not (fixed and values[0] is not None):
        return MIXED
    if None in values:
        return _absorbed(name, values, dtype == np.dtype("bool"))
    known = [value for value in values if value is not None]
    with np.errstate(all="ignore"):
        found = _computed(eqn, known, dtype)
        if found is None:
            return None
        if jnp.issubdtype(dtype, np.integer) and not abs(found) < 2**31:
            return None
        value = float(np.asarray(found).astype(dtype))
    if math.isnan(value):
        return MIXED
    steep = name in ("sqrt", "cbrt", "pow") and known[0] == 0
    steep |= math.isinf(value) and all(map(math.isfinite, known))
    return MIXED if steep and not fixed else value


def _absorbed(name: str, values: Sequence[float | None], boolean: bool) -> float | None:
    """Return the result that one operand decides, whatever finite number the other is."""
    of = {"mul": 0.0, "max": math.inf, "min": -math.inf}
    of |= {"and": 0.0, "or": 1.0} if boolean else {}
    if name in of:
        return of[name] if of[name] in values else None
    if name not in ("div", "add", "add_any", "sub"):
        return None
    left, right = values
    if name == "div":
        return 0.0 if left == 0 or (right is not None and math.isinf(right)) else None
    infinite = [each for each in (left, right) if each is not None and math.isinf(each)]
    if not infinite:
        return None
    return -infinite[0] if name == "sub" and left is None else infinite[0]


def _computed(eqn: Any, known: list[float], dtype: Any) -> Any:
    name = eqn.primitive.name
    if name == "integer_pow":
        return np.float64(known[0]) ** eqn.params["y"]
    if dtype == np.dtype("bool") and name in ("not", "and", "or", "xor"):
        return getattr(np, f"logical_{name}")(*known)
    if name == "clamp":
        return np.clip(known[1], known[0], known[2])
    if name == "div" and not jnp.issubdtype(dtype, np.floating):
        return None
    return _NUMPY[name](*map(np.float64, known)) if name in _NUMPY else None


_SAME = "convert_element_type copy name pvary real reduce_precision sharding_constraint"
_OF_NUMPY = "add cbrt ceil cos exp exp2 expm1 floor log log1p sign sin sqrt square tanh"
_NUMPY: dict[str, Any] = {
    **dict.fromkeys((*_SAME.split(), "stop_gradient"), lambda value: value),
    **{name: getattr(np, name) for name in _OF_NUMPY.split()},
    "abs": np.abs,
    "add_any": np.add,
    "div": np.divide,
    "eq": np.equal,
    "erf": math.erf,
    "ge": np.greater_equal,
    "gt": np.greater,
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "logistic": lambda value: 1 / (1 + np.exp(-value)),
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "pow": np.power,
    "rsqrt": lambda value: 1 / np.sqrt(value),
    "sub": np.subtract,
}


def is_positive(eqn: Any, places: Sequence[Location], out: Any, found: Location) -> Location:
    """Return the place `found` of the result `out`, with whether no entry is negative."""
    name = eqn.primitive.name
    signs = list(map(_positive, places))
    odd = name == "integer_pow" and eqn.params["y"] % 2
    positive = out.dtype == np.dtype("bool") or jnp.issubdtype(out.dtype, np.unsignedinteger)
    positive |= name in _NEVER_NEGATIVE or (name == "integer_pow" and not odd)
    positive |= name == "mul" and eqn.invars[0] is eqn.invars[1]
    positive |= name == "max" and any(signs)
    positive |= name == "select_n" and all(signs[1:])
    positive |= (name in _KEEP_SIGN or bool(odd)) and all(signs)
    positive |= name in _OF_FIRST and signs[0]
    if isinstance(found, Padded):
        return dataclasses.replace(found, positive=bool(positive))
    return POSITIVE if positive and found == GIVEN else found


def _positive(place: Location) -> bool:
    known = isinstance(place, FixedNumber) and place.value >= 0
    return known or place == POSITIVE or (isinstance(place, Padded) and place.positive)


_NEVER_NEGATIVE = {"abs", "argmax", "argmin", "exp", "exp2", "iota", "logistic", "rsqrt", "sqrt"}
_NEVER_NEGATIVE |= {"square"}
_KEEP_SIGN = {"add", "add_any", "concatenate", "convert_element_type", "copy", "cummax", "cummin"}
_KEEP_SIGN |= {"broadcast_in_dim", "cumprod", "cumsum", "div", "dot_general", "erf", "expm1"}
_KEEP_SIGN |= {"floor", "log1p", "min", "mul", "pad", "reduce_max", "reduce_min", "reduce_prod"}
_KEEP_SIGN |= {"reduce_precision", "reduce_sum", "reshape", "rev", "sharding_constraint", "sign"}
_KEEP_SIGN |= {"slice", "sort", "squeeze", "stop_gradient", "tanh", "transpose"}
_OF_FIRST = {"dynamic_slice", "gather", "pow"}

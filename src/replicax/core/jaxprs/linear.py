"""Whether results of a function are linear in some of its inputs, as its trace shows."""

import enum
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from replicax.core.jaxprs.jaxpr import (
    CALLS,
    REMATS,
    RULED,
    called,
    closed,
    evaluate_jaxpr,
    fixed_point,
    of_scan,
    shapes_of,
)


class Linearity(enum.Enum):
    """How a value depends on the inputs."""

    NONE = "it does not"
    ZERO = "it is 0"
    LINEAR = "it is linear in them"
    OTHER = "otherwise, or unknown"


_KEEPING = {
    *("broadcast_in_dim", "copy", "copy_p", "dynamic_slice", "expand_dims", "gather", "neg"),
    *("real", "reduce_precision", "reduce_sum", "reshape", "rev", "slice"),
    *("convert_element_type", "cumsum", "squeeze", "transpose"),
    "dew_flash3_mha_bwd",  # a target of `ffi_call`
}
"""Operations that are linear in their first operand, and keep 0."""
_ADDING = {"add", "add_any", "concatenate", "pad", "sub"}
_UPDATING = {"dynamic_update_slice": 1, "scatter-add": 2, "scatter_add": 2}
"""Operations that put together their first operand and this one."""
_MULTIPLYING = {"mul", "dot_general", "conv_general_dilated"}


def linear_results(jaxpr: ClosedJaxpr | Jaxpr, inputs: Sequence[Linearity]) -> list[Linearity]:
    """Return how each result depends on the inputs that are not `NONE`."""
    return evaluate_jaxpr(jaxpr, inputs, _apply, _constant)


def _constant(value: Any) -> Linearity:
    return Linearity.NONE if np.ndim(value) or np.any(value != 0) else Linearity.ZERO


def _apply(eqn: JaxprEqn, parts: list[Linearity]) -> Sequence[Linearity]:
    name = eqn.params.get("target_name", eqn.primitive.name)
    count = len(eqn.outvars)
    if name in CALLS | REMATS | RULED:
        return linear_results(called(eqn), parts)
    if name == "optimization_barrier":
        return parts
    if name == "scan":
        fixed, carry, over = of_scan(eqn.params, parts)
        body = lambda carry: linear_results(eqn.params["jaxpr"], [*fixed, *carry, *over])  # noqa: E731
        carry, ys = fixed_point(body, carry, _sum)
        return [*carry, *ys]
    if name == "cond" and parts[0] in (Linearity.NONE, Linearity.ZERO):
        found = [linear_results(closed(each), parts[1:]) for each in eqn.params["branches"]]
        return list(map(_sum, zip(*found, strict=True)))
    moved = {Linearity.LINEAR, Linearity.OTHER}.intersection(parts)
    if not moved:
        keeps = name in _KEEPING and parts[0] == Linearity.ZERO
        return [Linearity.ZERO if keeps else Linearity.NONE] * count
    is_float = all(jnp.issubdtype(out.dtype, jnp.inexact) for out in shapes_of(eqn.outvars))
    return [_of(name, parts) if is_float else Linearity.OTHER] * count


def _of(name: str, parts: list[Linearity]) -> Linearity:
    first, *rest = parts
    free = not {Linearity.LINEAR, Linearity.OTHER}.intersection(rest)
    if name in _KEEPING or name == "div":
        return first if free else Linearity.OTHER
    if name in _ADDING:
        return _sum(parts)
    if name in _UPDATING:
        place = _UPDATING[name]
        others = [each for n, each in enumerate(parts) if n not in (0, place)]
        fixed = not {Linearity.LINEAR, Linearity.OTHER}.intersection(others)
        return _sum([first, parts[place]]) if fixed else Linearity.OTHER
    if name == "select_n":
        return _sum(rest) if first in (Linearity.NONE, Linearity.ZERO) else Linearity.OTHER
    if name in _MULTIPLYING and Linearity.OTHER not in parts:
        several = parts.count(Linearity.LINEAR) > 1
        return (
            Linearity.OTHER
            if several
            else Linearity.ZERO
            if Linearity.ZERO in parts
            else Linearity.LINEAR
        )
    return Linearity.OTHER


def _sum(parts: Sequence[Linearity]) -> Linearity:
    """Return how a sum depends on them, or one of several values.

    With one that the inputs do not change, and that is not 0, it is not linear.
    """
    found = set(parts) - {Linearity.ZERO}
    return found.pop() if len(found) == 1 else Linearity.ZERO if not found else Linearity.OTHER

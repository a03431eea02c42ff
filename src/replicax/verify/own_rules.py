"""Rules that code defines for its derivatives: `jax.custom_vjp` and `jax.custom_jvp`.

`without` computes a program as if a function had no rule, so that JAX differentiates what the
function computes.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.jaxprs.jaxpr import (
    CALLS,
    RULED,
    bind_eqn,
    called,
    closed,
    evaluate_jaxpr,
    shapes_of,
)
from replicax.core.jaxprs.row_inner import moves

_LIBRARIES = ("jax", "flax", "optax", "equinox", "replicax")
"""Packages whose rules are taken to be derivatives."""
_PLACE = re.compile(r"(.*) at (.*):(\d+)$")
_KEEP = {"sharding_constraint", "optimization_barrier", "copy", "copy_p", "reshard"}
"""Primitives that return what they are given."""


@dataclasses.dataclass(frozen=True)
class OwnRule:
    """A function with a derivative of its own."""

    name: str
    file: str
    line: int
    surrogate: str = dataclasses.field(default="", compare=False)
    """Why its rule must be meant to be another than the derivative; empty if nothing says so."""

    def __str__(self) -> str:
        return f"{self.name} ({Path(self.file).name}:{self.line})" if self.file else self.name


def rules_in(jaxpr: ClosedJaxpr | Jaxpr, *, of_libraries: bool = False) -> list[OwnRule]:
    """Return the rules of a program's functions: of the user's, or only those of libraries."""
    found: dict[OwnRule, OwnRule] = {}
    for eqn in _ruled(closed(jaxpr).jaxpr):
        rule = _rule_of(eqn)
        if rule not in found and rule.file.startswith(_library_folders()) == of_libraries:
            found[rule] = dataclasses.replace(rule, surrogate=_surrogate(called(eqn)))
    return list(found.values())


def without(whole: ClosedJaxpr, rule: OwnRule) -> Callable[..., list[Any]]:
    """Return the function of a program, where `rule` is replaced by JAX's derivatives."""

    def run(jaxpr: ClosedJaxpr | Jaxpr, values: Sequence[Any]) -> list[Any]:
        return evaluate_jaxpr(jaxpr, values, apply, lambda value: value)

    def apply(eqn: JaxprEqn, values: list[Any]) -> list[Any]:
        if eqn.primitive.name in CALLS or (eqn.primitive.name in RULED and _rule_of(eqn) == rule):
            return run(called(eqn), values)
        return bind_eqn(eqn.replace(params=inside(eqn)), values)

    def inside(eqn: JaxprEqn) -> dict[str, Any]:
        if eqn.primitive.name in RULED:
            return eqn.params
        return {name: replaced(value) for name, value in eqn.params.items()}

    def replaced(value: Any) -> Any:
        if type(value) is tuple:
            return tuple(map(replaced, value))
        if not isinstance(value, ClosedJaxpr | Jaxpr):
            return value
        if rule not in map(_rule_of, _ruled(closed(value).jaxpr)):
            return value
        shapes = shapes_of(closed(value).jaxpr.invars)
        made = jax.make_jaxpr(lambda *values: run(value, values))(*shapes)
        return made if isinstance(value, ClosedJaxpr) else made.jaxpr

    return lambda *values: run(whole, values)


def _ruled(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in RULED:
            yield eqn
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from _ruled(inner)


def _rule_of(eqn: JaxprEqn) -> OwnRule:
    place = str(called(eqn).jaxpr.debug_info.func_src_info or "")
    parts = _PLACE.match(place)
    return (
        OwnRule(parts[1], parts[2], int(parts[3]))
        if parts
        else OwnRule(place or "a function", "", 0)
    )


def _library_folders() -> tuple[str, ...]:
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _LIBRARIES)
    return tuple(f"{Path(file).parent}/" for file in files if file)


def _surrogate(function: ClosedJaxpr) -> str:
    """Return why a function with such values has its rule on purpose, or nothing.

    A rule that is only the derivative would not be written for one that returns its input, or by
    an input that moves it in steps.
    """
    if all(eqn.primitive.name in _KEEP for eqn in function.jaxpr.eqns):
        return "returns its input"
    floats = [n for n, atom in enumerate(function.jaxpr.invars) if moves(atom)]
    given = shapes_of(function.jaxpr.invars)

    def moved(values: list[Any], tangents: list[Any]) -> Any:
        def of(*own: Any) -> Any:
            known = dict(enumerate(values)) | dict(zip(floats, own, strict=True))
            found = jaxpr_as_fun(function)(*known.values())
            return [leaf for leaf in found if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        return jax.jvp(of, tuple(values[n] for n in floats), tuple(tangents))[1]

    try:
        tangents = jax.make_jaxpr(moved)(given, [given[n] for n in floats]).jaxpr
    except Exception:  # a kernel, or another that JAX cannot differentiate
        return ""
    _, used = dce_jaxpr(function.jaxpr, [True] * len(function.jaxpr.outvars))
    _, moving = dce_jaxpr(tangents, [True] * len(tangents.outvars))
    steps = [n for n, moves in zip(floats, moving[len(given) :], strict=True) if not moves]
    return "has a derivative of 0" if any(used[n] for n in steps) else ""

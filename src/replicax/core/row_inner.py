"""Follow rows through loops, branches and solvers, and through derivatives that code defines."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from replicax.core.equations import bind, of_scan, settle, shapes_of
from replicax.core.row_counts import Place, either, is_plain
from replicax.core.row_rules import MIXED, Rows

Following = Callable[[ClosedJaxpr, ClosedJaxpr, list[Place]], list[Place]]
"""Follows rows through two traces, given the places of their inputs."""


@functools.lru_cache(maxsize=256)
def derivative(eqn: Any) -> ClosedJaxpr:
    """Return the rule of an equation in `RULED`: of its inputs, and their or its own derivatives.

    `custom_jvp_call` returns derivatives of its results, `custom_vjp_call` those of its inputs.
    """
    given = shapes_of(eqn.invars)
    floats = [n for n, atom in enumerate(eqn.invars) if moves(atom)]
    forward = eqn.primitive.name == "custom_jvp_call"

    def run(values: list[Any], derivatives: list[Any]) -> Any:
        def of(*own: Any) -> Any:
            known = dict(enumerate(values)) | dict(zip(floats, own, strict=True))
            return bind(eqn, list(known.values()))

        own = tuple(values[n] for n in floats)
        if forward:
            return jax.jvp(of, own, tuple(derivatives))[1]
        return jax.vjp(of, *own)[1](derivatives)

    outs = shapes_of(eqn.outvars)
    jaxpr: ClosedJaxpr = jax.make_jaxpr(run)(given, [given[n] for n in floats] if forward else outs)
    return jaxpr


def moves(atom: Any) -> bool:
    """Whether a value has a derivative."""
    return bool(jnp.issubdtype(atom.aval.dtype, jnp.inexact))


def _scan(follow: Following, params: Any, twin: Any, places: list[Place]) -> list[Place]:
    fixed, carry, over = of_scan(params, places)
    steps: list[Place] = []
    for each in over:
        rows = isinstance(each, Rows) and each.dim > 0
        steps.append(Rows(each.dim - 1, each.each, each.power) if rows else each and MIXED)
    body = lambda carry: follow(params["jaxpr"], twin["jaxpr"], [*fixed, *carry, *steps])  # noqa: E731
    carry, ys = settle(body, carry, either)
    stacked = [_stacked(each) for each in ys]
    found = [*carry, *stacked]
    return [MIXED] * len(found) if params["length"] != twin["length"] else found


def _stacked(place: Place) -> Place:
    if isinstance(place, Rows) and place != MIXED:
        return Rows(place.dim + 1, place.each, place.power)
    return place if is_plain(place) else MIXED


def _while(follow: Following, params: Any, twin: Any, places: list[Place]) -> list[Place]:
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    body, carry = places[of_cond:][:of_body], places[of_cond + of_body :]
    run = lambda carry: follow(params["body_jaxpr"], twin["body_jaxpr"], [*body, *carry])  # noqa: E731
    carry, _ = settle(run, carry, either)
    cond = params["cond_jaxpr"], twin["cond_jaxpr"]
    [goes_on] = follow(*cond, [*places[:of_cond], *carry])
    if isinstance(goes_on, Rows) and goes_on != MIXED:  # under vmap, each row has its own
        return [each if each == goes_on else MIXED for each in carry]
    return [MIXED] * len(carry) if goes_on else carry


def _cond(follow: Following, params: Any, twin: Any, places: list[Place]) -> list[Place]:
    which, *operands = places
    pairs = zip(params["branches"], twin["branches"], strict=True)
    branches = [follow(*pair, operands) for pair in pairs]
    return [MIXED if which else either(each) for each in zip(*branches, strict=True)]


def _solve(follow: Following, params: Any, twin: Any, places: list[Place]) -> list[Place]:
    """Follow rows through a solver, and through the product that its derivative also needs."""
    lengths = params["const_lengths"]
    product, rest = places[: lengths.matvec], places[lengths.matvec + lengths.vecmat :]
    count = lengths.solve + lengths.transpose_solve
    right = rest[count:]
    found = []
    for name, consts in (("solve", rest[: lengths.solve]), ("matvec", product)):
        one, two = (getattr(each["jaxprs"], name) for each in (params, twin))
        found.append(follow(one, two, [*consts, *right]))
    return [one if one == two else MIXED for one, two in zip(*found, strict=True)]


WITH_INNER = {"scan": _scan, "while": _while, "cond": _cond, "custom_linear_solve": _solve}

"""Determine from a jaxpr whether each row of a result depends on only one row of a batch.

Unknown primitives count as mixing rows, so independence is never assumed without proof.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.equations import CALLS, REMATS, called, closed, evaluate, of_scan, settle
from replicax.core.row_rules import MIXED, RULES, Place, Rows, joined

GATHERED = "rows_gathered_already"
"""Name of the function that stands for `gather` if one device has the whole batch."""
SUMMED = "sums_of_all_replicas"
"""Name of the function that returns sums over the rows of all replicas."""


def follow(jaxpr: ClosedJaxpr | Jaxpr, inputs: Sequence[Place]) -> list[Place]:
    """Return the row placements in the outputs of `jaxpr`, given those in its inputs."""
    return evaluate(jaxpr, inputs, _outputs, lambda _: None)


def gathers(jaxpr: ClosedJaxpr) -> bool:
    """Whether rows are gathered anywhere in `jaxpr`."""
    eqns = (eqn for inner in _all_within(jaxpr) for eqn in inner.jaxpr.eqns)
    return any(eqn.params.get("name") == GATHERED for eqn in eqns)


def holds_number(jaxpr: ClosedJaxpr, numbers: Collection[float]) -> bool:
    """Whether one of `numbers`, in float32, is a floating-point constant anywhere in `jaxpr`."""
    return any(
        _is_float(value) and float(value) in numbers
        for inner in _all_within(jaxpr)
        for value in (*inner.consts, *_literals(inner.jaxpr))
    )


def numbers_places(jaxpr: ClosedJaxpr, count: int) -> bool:
    """Whether `jaxpr` has values that may differ by index in `count`: an `arange`, or constants."""
    return any(
        count in np.shape(const) for inner in _all_within(jaxpr) for const in inner.consts
    ) or any(
        eqn.primitive.name == "iota" and eqn.params["shape"][eqn.params["dimension"]] == count
        for inner in _all_within(jaxpr)
        for eqn in inner.jaxpr.eqns
    )


def _literals(jaxpr: Jaxpr) -> Iterator[Any]:
    return (atom.val for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, Literal))


def _is_float(value: Any) -> bool:
    if isinstance(value, jax.core.Tracer):  # from a custom step around the loss
        return False
    if hasattr(value, "dtype"):
        return np.shape(value) == () and bool(jnp.issubdtype(value.dtype, np.floating))
    return isinstance(value, float)


def _all_within(jaxpr: ClosedJaxpr) -> Iterator[ClosedJaxpr]:
    yield jaxpr
    for eqn in jaxpr.jaxpr.eqns:
        for inner in jax.tree.leaves(list(eqn.params.values())):
            if isinstance(inner, ClosedJaxpr | Jaxpr):
                yield from _all_within(closed(inner))


def _outputs(eqn: Any, places: list[Place]) -> list[Place]:
    name, count = eqn.primitive.name, len(eqn.outvars)
    if not count or eqn.params.get("name") in _OF_ALL or not any(places):
        return [None] * count
    if name == "optimization_barrier":
        return places
    if name in _WITH_INNER:
        return _WITH_INNER[name](eqn.params, places)
    if name in _CALLS:
        return follow(called(eqn), places)
    if MIXED in places:
        return [MIXED] * count
    shapes = [atom.aval.shape for atom in eqn.invars]
    out = eqn.outvars[0].aval.shape
    rule = RULES.get(name)
    return [rule(eqn.params, places, shapes, out) if rule else MIXED] * count


# Primitives that call other jaxprs.


def _scan(params: Any, places: list[Place]) -> list[Place]:
    fixed, carry, over = of_scan(params, places)
    steps = [each and (Rows(each.dim - 1, each.each) if each.dim > 0 else MIXED) for each in over]
    carry, ys = settle(
        lambda carry: follow(params["jaxpr"], [*fixed, *carry, *steps]), carry, joined
    )
    stacked = [each if each in (None, MIXED) else Rows(each.dim + 1, each.each) for each in ys]
    return [*carry, *stacked]


def _while(params: Any, places: list[Place]) -> list[Place]:
    of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
    body, carry = places[of_cond:][:of_body], places[of_cond + of_body :]
    carry, _ = settle(lambda carry: follow(params["body_jaxpr"], [*body, *carry]), carry, joined)
    goes_on = follow(params["cond_jaxpr"], [*places[:of_cond], *carry])
    return [MIXED] * len(carry) if any(goes_on) else carry


def _cond(params: Any, places: list[Place]) -> list[Place]:
    which, *operands = places
    branches = [follow(branch, operands) for branch in params["branches"]]
    return [MIXED if which else joined(each) for each in zip(*branches, strict=True)]


_OF_ALL = {GATHERED, SUMMED}
"""Names of functions whose results are equal on all replicas."""

_CALLS = CALLS | REMATS | {"custom_jvp_call", "custom_vjp_call"}
_WITH_INNER = {"scan": _scan, "while": _while, "cond": _cond}


def moves(traced: ClosedJaxpr, count: int) -> bool:
    """Whether the first output has a nonzero derivative by any of the first `count` inputs."""
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in traced.in_avals]
    moved = [i for i in range(count) if jnp.issubdtype(shapes[i].dtype, jnp.inexact)]

    def derivative(values: list[Any], tangents: list[Any]) -> Any:
        def first(*own: Any) -> Any:
            known = dict(enumerate(values)) | dict(zip(moved, own, strict=True))
            return jaxpr_as_fun(traced)(*known.values())[0]

        return jax.jvp(first, tuple(values[i] for i in moved), tuple(tangents))[1]

    jaxpr = jax.make_jaxpr(derivative)(shapes, [shapes[i] for i in moved]).jaxpr
    _, used = dce_jaxpr(jaxpr, [True])
    return any(used[len(shapes) :])

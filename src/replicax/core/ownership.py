"""Which values of a step each micro-shard has of its own: those that follow from its rows."""

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from replicax.core.equations import CALLS, scan_counts
from replicax.core.meeting import gather_p, own_p, sum_p
from replicax.errors import LossError

WRAPPERS = CALLS | {"checkpoint", "remat2"}
"""Primitives that only call the jaxpr in their parameter `jaxpr`."""


def meets(eqn: JaxprEqn) -> bool:
    """Whether micro-shards meet in an equation, or in a function that it calls."""
    return eqn.primitive in (sum_p, gather_p) or any(
        meets(inner) for jaxpr in jaxprs_in_params(eqn.params) for inner in jaxpr.eqns
    )


def own_results(jaxpr: Jaxpr, own: Sequence[bool]) -> list[bool]:
    """Return which results of `jaxpr` are own, given which arguments are."""
    known = {var for var, each in zip(jaxpr.invars, own, strict=True) if each}
    for eqn in jaxpr.eqns:
        found = own_of(eqn, [is_own(atom, known) for atom in eqn.invars])
        known |= {var for var, each in zip(eqn.outvars, found, strict=True) if each}
    return [is_own(atom, known) for atom in jaxpr.outvars]


def is_own(atom: Any, known: set[Any]) -> bool:
    """Whether an atom is among the `known` own values."""
    return not isinstance(atom, Literal) and atom in known


def own_of(eqn: JaxprEqn, own: Sequence[bool]) -> list[bool]:
    """Return which results of an equation are own, given which operands are."""
    primitive = eqn.primitive
    if primitive is own_p:
        return [True]
    if primitive is gather_p:
        return [False]
    if primitive is sum_p:
        return [dim is not None for dim in eqn.params["lie"]]
    if not meets(eqn):
        return [any(own)] * len(eqn.outvars)
    if primitive.name in WRAPPERS:
        return own_results(body(eqn.params["jaxpr"]), own)
    if primitive.name == "scan":
        return scanned(eqn, own)[1]
    if primitive.name == "while":
        return turned(eqn, own)
    if primitive.name == "cond":
        _refuse(own[0], "lax.cond")
        each = [own_results(body(branch), own[1:]) for branch in eqn.params["branches"]]
        return [any(found) for found in zip(*each, strict=True)]
    raise LossError(
        f"rx.value_and_grad or rx.mean was called inside of {primitive.name}, where mode='exact' "
        "cannot sum over all rows: call it outside, or in a Python loop, lax.scan or lax.cond"
    )


def scanned(eqn: JaxprEqn, own: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Return which arguments of a scan's body are own, and which results of the scan."""
    consts, carried = scan_counts(eqn.params)
    own = list(own)
    while True:
        found = own_results(body(eqn.params["jaxpr"]), own)
        after = [a or b for a, b in zip(own[consts : consts + carried], found, strict=False)]
        if after == own[consts : consts + carried]:
            return own, [*after, *found[carried:]]
        own[consts : consts + carried] = after


def turned(eqn: JaxprEqn, own: Sequence[bool]) -> list[bool]:
    """Return which values that a while loop carries are own."""
    tested, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = list(own[tested + consts :])
    while True:
        found = own_results(
            body(eqn.params["body_jaxpr"]), [*own[tested : tested + consts], *carry]
        )
        after = [a or b for a, b in zip(carry, found, strict=True)]
        if after == carry:
            break
        carry = after
    [ends] = own_results(body(eqn.params["cond_jaxpr"]), [*own[:tested], *carry])
    _refuse(ends, "lax.while_loop")
    return carry


def body(jaxpr: Any) -> Jaxpr:
    """Return a jaxpr without its constants, closed or not."""
    found: Jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return found


def _refuse(own: bool, what: str) -> None:
    if own:
        raise LossError(
            f"{what} around rx.value_and_grad or rx.mean depends on rows, of which each replica "
            "sees others: let it follow from rx.mean of them"
        )

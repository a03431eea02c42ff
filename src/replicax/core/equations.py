"""The equations of a jaxpr, one by one."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

CALLS = {"jit", "pjit", "closed_call", "core_call"}
"""Primitives that only call the jaxpr in their parameter `jaxpr`."""


def each_alone(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """Yield each equation as a jaxpr of its own."""
    for eqn in jaxpr.eqns:
        read = dict.fromkeys(atom for atom in eqn.invars if not isinstance(atom, Literal))
        yield jaxpr.replace(constvars=[], invars=list(read), outvars=eqn.outvars, eqns=[eqn])


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many constants a scan has, and how many values it carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()  # since jax 0.11
    return len(consts), len(carried)


def bind(alone: Jaxpr, values: Sequence[Any]) -> list[Any]:
    """Return what one equation gives for `values`, in the scopes that it was traced in."""
    pairs = zip(alone.eqns[0].invars, values, strict=True)
    known = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
    found: list[Any] = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*known.values())
    return found

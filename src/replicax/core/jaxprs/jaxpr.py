"""Utilities for the equations of a jaxpr: evaluate, inline, and eliminate dead code."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, gensym, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

CALLS = {"jit", "pjit", "closed_call", "core_call"}
"""Primitives that only call a jaxpr."""
RULED = {"custom_jvp_call", "custom_vjp_call"}
"""Primitives that call a jaxpr with a derivative of its own."""
REMATS = {"checkpoint", "remat", "remat2"}
"""Primitives that call a jaxpr, and again in the backward pass."""


EXPANDS = "call_hi_primitive"
"""A primitive of jax 0.12 and newer that calls what its operation expands to: searchsorted."""


def called(eqn: JaxprEqn) -> ClosedJaxpr:
    """Return the jaxpr called by an equation with one of these primitives."""
    if eqn.primitive.name == EXPANDS:
        return _expanded(eqn)
    return closed(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"])


@functools.lru_cache(maxsize=256)
def _expanded(eqn: JaxprEqn) -> ClosedJaxpr:
    operation = eqn.params["_prim"]
    expand = lambda *arrays: operation.expand(*jax.tree.unflatten(operation.in_tree, arrays))  # noqa: E731
    found: ClosedJaxpr = jax.make_jaxpr(expand)(*shapes_of(eqn.invars))
    return found


def closed(jaxpr: ClosedJaxpr | Jaxpr) -> ClosedJaxpr:
    """Return `jaxpr` as a closed jaxpr; an open one is closed over no constants."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Return the `atoms` that are not literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def simple_params(params: Any) -> dict[str, Any]:
    """Return the parameters of an equation, without shapes and without what it calls."""
    return {
        name: value for name, value in params.items() if name not in _SHAPES and _is_simple(value)
    }


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_simple, value))
    return value is None or isinstance(value, int | float | str | np.dtype | np.generic)


_SHAPES = {"shape", "new_sizes", "limit_indices", "slice_sizes", "sizes", "length"}


def shapes_of(atoms: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of `atoms`."""
    return [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return a scan's numbers of constants and of carried values."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()  # since jax 0.11
    return len(consts), len(carried)


def of_scan(params: Mapping[str, Any], values: Sequence[Any]) -> tuple[list[Any], ...]:
    """Split a scan's operands, `values`, into its constants, initial carry, and `xs`."""
    consts, carried = scan_counts(params)
    return list(values[:consts]), list(values[consts:][:carried]), list(values[consts + carried :])


def evaluate_jaxpr(
    jaxpr: ClosedJaxpr | Jaxpr,
    inputs: Sequence[Any],
    apply: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any],
) -> list[Any]:
    """Evaluate `jaxpr` on `inputs` of any kind, using `apply` for each equation.

    `constant` converts a literal or a constant to this kind.
    """
    whole = closed(jaxpr)
    jaxpr = whole.jaxpr
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, map(constant, whole.consts), strict=True))
    known.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [constant(a.val) if isinstance(a, Literal) else known[a] for a in atoms]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, apply(eqn, read(eqn.invars)), strict=True))
    return read(jaxpr.outvars)


def fixed_point(
    body: Callable[[list[Any]], list[Any]], carry: list[Any], join: Callable[[Any], Any]
) -> tuple[list[Any], list[Any]]:
    """Return the fixed point of a loop's carry, joined after each pass, and the other outputs.

    The other outputs are the values that `body` returns after the carry.
    """
    while True:
        found = body(carry)
        after = [join(pair) for pair in zip(carry, found, strict=False)]
        if after == carry:
            return carry, found[len(carry) :]
        carry = after


def bind_eqn(eqn: JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """Evaluate an equation on `values`, in the name scopes it was traced in."""
    pairs = zip(eqn.invars, values, strict=True)
    known = {atom: value for atom, value in pairs if not isinstance(atom, Literal)}
    alone = _nothing().replace(invars=list(known), outvars=eqn.outvars, eqns=[eqn])
    found: list[Any] = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*known.values())
    return found


@functools.cache
def _nothing() -> Jaxpr:
    nothing: Jaxpr = jax.make_jaxpr(lambda: ())().jaxpr
    return nothing


def inlined(whole: ClosedJaxpr, opens: Callable[[JaxprEqn], bool]) -> ClosedJaxpr:
    """Return `whole` with the calls selected by `opens` inlined."""
    consts = dict(zip(whole.jaxpr.constvars, whole.consts, strict=True))
    eqns: list[JaxprEqn] = []
    new = gensym()

    def add(jaxpr: Jaxpr, known: dict[Any, Any]) -> list[Any]:
        """Append the equations of `jaxpr`, renaming variables by `known` or to new ones."""

        def named(atoms: Sequence[Any]) -> list[Any]:
            return [a if isinstance(a, Literal) else known.get(a, a) for a in atoms]

        for eqn in jaxpr.eqns:
            given = named(eqn.invars)
            if opens(eqn):
                inner = called(eqn)
                consts.update(zip(inner.jaxpr.constvars, inner.consts, strict=True))
                found = add(inner.jaxpr, dict(zip(inner.jaxpr.invars, given, strict=True)))
            else:
                found = [v if isinstance(v, DropVar) else new(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=given, outvars=found))
            known.update(zip(eqn.outvars, found, strict=True))
        return named(jaxpr.outvars)

    found = add(whole.jaxpr, {})
    unnamed = whole.jaxpr.debug_info.with_unknown_names()
    jaxpr = whole.jaxpr.replace(
        constvars=list(consts), outvars=found, eqns=eqns, debug_info=unnamed
    )
    return ClosedJaxpr(jaxpr, list(consts.values()))


def only(whole: ClosedJaxpr, wanted: Sequence[bool]) -> tuple[Callable[..., list[Any]], list[bool]]:
    """Return a function computing the `wanted` outputs, and flags of the inputs it needs."""
    jaxpr, used = dce_jaxpr(whole.jaxpr, list(wanted))
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, whole.consts)), used

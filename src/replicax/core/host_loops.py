"""Loops and branches around sums, which the host runs: each turn by the same programs."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from replicax.core.equations import scan_counts
from replicax.core.meeting import own
from replicax.core.ownership import own_of, scanned, turned
from replicax.core.same_program import Own

Operation = Callable[[list[Any]], list[Any]]


class PartCompiler(Protocol):
    """Compiles parts of a step."""

    @property
    def inner(self) -> Callable[[Callable[..., Any], Sequence[Any], list[Own], list[Own]], Any]:
        """Compiles a function of one micro-shard's arrays, of their avals and lies."""

    def placed(self, value: Any) -> jax.Array:
        """Return a constant as an array that all devices have alike."""


def scan(compiler: PartCompiler, eqn: JaxprEqn, into: list[Own], out: list[Own]) -> Operation:
    """Return the function of the operands of a scan to its results."""
    length, (consts, carried) = eqn.params["length"], scan_counts(eqn.params)
    body = jaxpr_as_fun(eqn.params["jaxpr"])
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    owned, _ = scanned(eqn, [lie is not None for lie in into])
    split = consts + carried
    carry_owned, carry_avals = owned[consts:split], avals[consts:split]

    def turn(*values: Any) -> list[Any]:
        *held, number = values
        rows = [lax.dynamic_index_in_dim(each, number, 0, keepdims=False) for each in held[split:]]
        found = body(*held[:split], *rows)
        return [*_as_own(found[:carried], carry_owned), *found[carried:]]

    begin = compiler.inner(
        lambda *carry: _as_own(carry, carry_owned), carry_avals, into[consts:split], out[:carried]
    )
    of_turn = [*into[:consts], *out[:carried], *into[split:], None]
    number_aval = jax.ShapeDtypeStruct((), np.int32)
    rows = [0] * (len(out) - carried)
    turns = compiler.inner(turn, [*avals, number_aval], of_turn, [*out[:carried], *rows])
    gathered: list[Any] = [var.aval for var in eqn.outvars[carried:]]
    stack = [
        compiler.inner(
            lambda *each: [jnp.stack(each)],
            [jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype)] * length,
            [how] * length,
            [lie],
        )
        for aval, how, lie in zip(gathered, turns.out[carried:], out[carried:], strict=True)
    ]
    order = range(length)[::-1] if eqn.params["reverse"] else range(length)

    def run(values: list[Any]) -> list[Any]:
        carry = begin(values[consts:split])
        found: list[list[Any]] = [[] for _ in range(length)]
        for number in order:
            given = [*values[:consts], *carry, *values[split:], compiler.placed(np.int32(number))]
            after = turns(given)
            carry, found[number] = after[:carried], after[carried:]
        each = zip(*found, strict=True)
        return [*carry, *(join(list(row))[0] for join, row in zip(stack, each, strict=True))]

    return run


def while_loop(compiler: PartCompiler, eqn: JaxprEqn, into: list[Own], out: list[Own]) -> Operation:
    """Return the function of the operands of a while loop to its results."""
    tested, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    split, avals = tested + consts, [atom.aval for atom in eqn.invars]
    owned = turned(eqn, [lie is not None for lie in into])
    body = jaxpr_as_fun(eqn.params["body_jaxpr"])
    begin = compiler.inner(lambda *carry: _as_own(carry, owned), avals[split:], into[split:], out)
    goes_on = compiler.inner(
        jaxpr_as_fun(eqn.params["cond_jaxpr"]),
        [*avals[:tested], *avals[split:]],
        [*into[:tested], *out],
        [None],
    )
    turn = compiler.inner(
        lambda *values: _as_own(body(*values), owned),
        avals[tested:],
        [*into[tested:split], *out],
        out,
    )

    def run(values: list[Any]) -> list[Any]:
        carry = begin(values[split:])
        while bool(np.asarray(goes_on([*values[:tested], *carry])[0])):
            carry = turn([*values[tested:split], *carry])
        return list(carry)

    return run


def cond(compiler: PartCompiler, eqn: JaxprEqn, into: list[Own], out: list[Own]) -> Operation:
    """Return the function of the operands of a cond to its results."""
    owned = own_of(eqn, [lie is not None for lie in into])
    avals = [atom.aval for atom in eqn.invars[1:]]

    def compiled(branch: ClosedJaxpr) -> Any:
        function = jaxpr_as_fun(branch)
        return compiler.inner(
            lambda *values: _as_own(function(*values), owned), avals, into[1:], out
        )

    branches = [compiled(branch) for branch in eqn.params["branches"]]
    return lambda values: list(branches[int(np.asarray(values[0]))](values[1:]))


HOST_LOOPS: dict[str, Callable[[PartCompiler, JaxprEqn, list[Own], list[Own]], Operation]] = {
    "scan": scan,
    "while": while_loop,
    "cond": cond,
}
"""By the primitive's name."""


def _as_own(values: Sequence[Any], owned: Sequence[bool]) -> list[Any]:
    """`values`, those that are `owned` as each micro-shard's own."""
    return [own(each) if is_own else each for each, is_own in zip(values, owned, strict=True)]

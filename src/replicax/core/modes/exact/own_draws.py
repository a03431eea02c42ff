"""Random numbers that the body of a step draws for rows: others in each micro-shard.

The body of a step has one key, from which each micro-shard would draw the same numbers for its
rows. The trace shows which draws are for rows: those that grow when there are half as many
micro-shards of twice the rows. Their keys get the number of the micro-shard. Draws for the state,
or for rows that were gathered, do not grow, and are the same in all micro-shards.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxprs_in_params

from replicax.core.jaxprs.jaxpr import (
    CALLS,
    REMATS,
    bind_eqn,
    called,
    closed,
    evaluate_jaxpr,
    fixed_point,
    of_scan,
    shapes_of,
)
from replicax.core.modes.exact.micro_shard_primitives import gather_p, own_of, own_p, sum_p
from replicax.errors import LossError

_DRAWING = {"random_bits", "random_gamma", "random_split", "random_fold_in"}
"""Primitives that draw numbers, or keys, from keys that are their first operand."""
_CALLS = CALLS | REMATS | {"custom_jvp_call", "custom_vjp_call"}


def with_own_draws(
    whole: ClosedJaxpr, own: Sequence[bool], halved: Callable[[], ClosedJaxpr]
) -> ClosedJaxpr:
    """Return `whole`, whose first input is the micro-shard's number, with its own draws for rows.

    `own` says which inputs differ by micro-shard; `halved()` is the trace with half as many.
    `LossError` if the traces do not show which draws are for rows.
    """
    draws = [eqn for eqn in _drawing(whole.jaxpr) if _shape(eqn)]
    if not _Draws({id(eqn) for eqn in draws}).of(whole, own):
        return whole
    rows = _Draws(_growing(whole, halved))
    if not rows.of(whole, own):
        return whole

    def run(number: jax.Array, *others: jax.Array) -> list[jax.Array]:
        values = [number, *others]
        return rows.drawn(whole, values, list(own), number)

    return jax.make_jaxpr(run)(*shapes_of(whole.jaxpr.invars))


def _drawing(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _DRAWING:
            yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _drawing(closed(inner).jaxpr)


def _shape(eqn: JaxprEqn) -> tuple[int, ...]:
    out: Any = eqn.outvars[0]
    shape: tuple[int, ...] = out.aval.shape
    return shape


def _growing(whole: ClosedJaxpr, halved: Callable[[], ClosedJaxpr]) -> set[int]:
    """Return the `id`s of the equations that draw for rows."""
    try:
        twins = list(_drawing(halved().jaxpr))
    except Exception as error:  # the user's code, on another number of rows
        raise _unclear() from error
    draws = list(_drawing(whole.jaxpr))
    if [eqn.primitive for eqn in draws] != [eqn.primitive for eqn in twins]:
        raise _unclear()
    return {id(eqn) for eqn, twin in zip(draws, twins, strict=True) if _shape(eqn) != _shape(twin)}


def _unclear() -> LossError:
    return LossError(
        "the step draws random numbers in its body, and its trace on twice the rows of a "
        "micro-shard does not show which are for rows: draw them in the loss"
    )


class _Draws:
    """The equations, by `id`, that draw other numbers in each micro-shard if their key does not."""

    def __init__(self, marked: set[int]) -> None:
        self._marked, self._met = marked, False

    def of(self, whole: ClosedJaxpr, own: Sequence[bool]) -> bool:
        """Whether a key of one is the same in all micro-shards, given which inputs are not."""
        self._met = False
        self._owned(whole, list(own))
        return self._met

    def _owned(self, jaxpr: ClosedJaxpr | Jaxpr, own: list[bool]) -> list[bool]:
        return evaluate_jaxpr(jaxpr, own, self._own_of, lambda _: False)

    def _own_of(self, eqn: JaxprEqn, own: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if eqn.primitive in (own_p, gather_p, sum_p):
            return own_of(eqn, own)
        if name in _CALLS:
            return self._owned(called(eqn), own)
        if name == "scan":
            return self._owned(eqn.params["jaxpr"], self._into_scan(eqn, own))
        if name == "while":
            return self._owned(eqn.params["body_jaxpr"], self._into_while(eqn, own)[1])
        if name == "cond":
            each = [self._owned(branch, own[1:]) for branch in eqn.params["branches"]]
            return [own[0] or any(flags) for flags in zip(*each, strict=True)]
        alike = self._is_alike(eqn, own)
        self._met |= alike
        return [alike or any(own)] * len(eqn.outvars)

    def _is_alike(self, eqn: JaxprEqn, own: list[bool]) -> bool:
        return id(eqn) in self._marked and not any(own)

    def _into_scan(self, eqn: JaxprEqn, own: list[bool]) -> list[bool]:
        fixed, carry, over = of_scan(eqn.params, own)
        body = partial(self._owned, eqn.params["jaxpr"])
        carry, _ = fixed_point(lambda carry: body([*fixed, *carry, *over]), carry, any)
        return [*fixed, *carry, *over]

    def _into_while(self, eqn: JaxprEqn, own: list[bool]) -> tuple[list[bool], list[bool]]:
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        fixed, carry = own[of_test:][:of_body], own[of_test + of_body :]
        body = partial(self._owned, eqn.params["body_jaxpr"])
        carry, _ = fixed_point(lambda carry: body([*fixed, *carry]), carry, any)
        [ends] = self._owned(eqn.params["cond_jaxpr"], [*own[:of_test], *carry])
        carry = [each or ends for each in carry]
        return [*own[:of_test], *carry], [*fixed, *carry]

    def drawn(
        self, jaxpr: ClosedJaxpr | Jaxpr, values: list[Any], own: list[bool], number: jax.Array
    ) -> list[Any]:
        """Return the results of `jaxpr`, with its own draws in the micro-shard of this `number`."""

        def apply(eqn: JaxprEqn, given: list[tuple[Any, bool]]) -> list[tuple[Any, bool]]:
            values, own = ([each[n] for each in given] for n in (0, 1))
            found = self._results(eqn, values, own, number)
            return list(zip(found, self._own_of(eqn, own), strict=True))

        pairs = list(zip(values, own, strict=True))
        return [value for value, _ in evaluate_jaxpr(jaxpr, pairs, apply, lambda v: (v, False))]

    def _results(
        self, eqn: JaxprEqn, values: list[Any], own: list[bool], number: jax.Array
    ) -> list[Any]:
        if self._is_alike(eqn, own):
            return bind_eqn(eqn, [_folded(values[0], number), *values[1:]])
        name, self._met = eqn.primitive.name, False
        self._own_of(eqn, own)
        if not self._met:
            return bind_eqn(eqn, values)
        if name in _CALLS:
            return self.drawn(called(eqn), values, own, number)
        return {"scan": self._scan, "while": self._while, "cond": self._cond}[name](
            eqn, values, own, number
        )

    def _scan(
        self, eqn: JaxprEqn, values: list[Any], own: list[bool], number: jax.Array
    ) -> list[Any]:
        fixed, carry, over = of_scan(eqn.params, values)
        into = self._into_scan(eqn, own)

        def body(carry: list[Any], over: list[Any]) -> tuple[list[Any], list[Any]]:
            found = self.drawn(eqn.params["jaxpr"], [*fixed, *carry, *over], into, number)
            return found[: len(carry)], found[len(carry) :]

        options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, rest = lax.scan(body, carry, over, **options)
        return [*carry, *rest]

    def _while(
        self, eqn: JaxprEqn, values: list[Any], own: list[bool], number: jax.Array
    ) -> list[Any]:
        of_test, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        test, fixed, carry = (
            values[:of_test],
            values[of_test:][:of_body],
            values[of_test + of_body :],
        )
        into_test, into_body = self._into_while(eqn, own)

        def goes_on(carry: list[Any]) -> Any:
            return self.drawn(eqn.params["cond_jaxpr"], [*test, *carry], into_test, number)[0]

        def body(carry: list[Any]) -> list[Any]:
            return self.drawn(eqn.params["body_jaxpr"], [*fixed, *carry], into_body, number)

        found: list[Any] = lax.while_loop(goes_on, body, carry)
        return found

    def _cond(
        self, eqn: JaxprEqn, values: list[Any], own: list[bool], number: jax.Array
    ) -> list[Any]:
        def of(branch: ClosedJaxpr) -> Callable[..., list[Any]]:
            return lambda *values: self.drawn(branch, list(values), own[1:], number)

        found: list[Any] = lax.switch(values[0], list(map(of, eqn.params["branches"])), *values[1:])
        return found


def _folded(keys: jax.Array, number: jax.Array) -> jax.Array:
    """Return `keys` with the micro-shard's number in them.

    Its complement, since a loss that is given the same key draws from it with the number itself.
    """
    each = jax.vmap(lambda key: jax.random.fold_in(key, ~number))(jnp.ravel(keys))
    return each.reshape(keys.shape)

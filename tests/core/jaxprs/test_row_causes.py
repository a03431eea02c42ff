"""Which operation mixed rows on the way to a value, of which kind, and on which line."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from replicax.core.jaxprs.row_causes import (
    BACKWARD,
    DRAWN_ALONE,
    ORDER,
    OTHER,
    PLACE,
    REDUCED,
    SUMS,
    Causes,
)
from replicax.core.jaxprs.row_dependence import Follow
from replicax.core.jaxprs.row_rules import Rows


@jax.custom_vjp
def centred_behind(x: Any) -> Any:
    return x * 2


centred_behind.defvjp(lambda x: (x * 2, None), lambda _, slope: (slope - jnp.mean(slope),))


def guarded(x: Any) -> Any:
    return jnp.sum(x * x) / jnp.maximum(jnp.sum(x > 0), 1)


def drawn(x: Any) -> Any:
    return x + jax.random.normal(jax.random.key(3), x.shape)


def last_of_a_scan(x: Any) -> Any:
    return jax.lax.scan(lambda carry, _: (carry, jnp.sort(carry)), x, None, length=2)[1]


def chosen(x: Any) -> Any:
    return jax.lax.cond(True, lambda x: x - jnp.max(x), lambda x: x, x)


def all_at_once(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: jnp.max(c) > 1, lambda c: c / 2, x)


MIXING: list[tuple[Callable[[Any], Any], str, str]] = [
    (lambda x: jnp.argsort(x) * x, "sort", ORDER),
    (lambda x: jax.lax.top_k(x, 2)[0], "top_k", ORDER),
    (lambda x: x[:, None] - x[None], "sub", ORDER),
    (lambda x: (x[:, None] * jnp.ones(2)) @ (jnp.ones((2, 1)) * x), "dot_general", ORDER),
    (lambda x: jnp.cumsum(x), "cumsum", ORDER),
    (lambda x: x - x.mean(), "sub", REDUCED),
    (lambda x: x / jnp.max(x), "reduce_max", REDUCED),
    (lambda x: jnp.sqrt(jnp.sum(x)), "sqrt", REDUCED),
    (lambda x: x * jnp.arange(len(x)), "mul", PLACE),
    (lambda x: x / len(x) + 1, "add", PLACE),
    (lambda x: jnp.fft.fft(x), "fft", OTHER),
    (guarded, "max", SUMS),
    (lambda x: centred_behind(x), "custom_vjp_call", BACKWARD),
    (drawn, "random_bits", DRAWN_ALONE),
    (last_of_a_scan, "sort", ORDER),
    (chosen, "reduce_max", REDUCED),
    (all_at_once, "reduce_max", REDUCED),
]


def of(function: Callable[[Any], Any]) -> Any:
    """Return the causes that a result of a function of rows is mixed."""
    one, two = (jax.make_jaxpr(function)(jnp.ones(rows)) for rows in (8, 4))
    follow = Follow((8, 4))
    follow(one, two, [Rows(0)])
    return Causes(follow, 8)(one)[0]


@pytest.mark.parametrize(("function", "name", "kind"), MIXING)
def test_the_operation_is_named_with_its_kind_and_line(
    function: Callable[[Any], Any], name: str, kind: str
) -> None:
    (cause,) = of(function)
    assert (cause.name, cause.kind) == (name, kind)
    assert cause.line.startswith("test_row_causes.py:")


def test_each_is_named_once_and_nothing_else() -> None:
    assert [each.name for each in of(lambda x: (jnp.sort(x) - jnp.sort(x)) * 2)] == ["sort"]
    assert [each.name for each in of(lambda x: jnp.sort(x) + jnp.cumsum(x))] == ["sort", "cumsum"]
    assert of(lambda x: x * 2) == ()

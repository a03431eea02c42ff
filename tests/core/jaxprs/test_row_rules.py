"""The examples in the docstrings of `row_rules` and `row_dependence`: where rows are."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lax import lax
from jax.extend.core import Primitive

from replicax.core.jaxprs.row_counts import Location, Total
from replicax.core.jaxprs.row_dependence import Follow
from replicax.core.jaxprs.row_rules import MIXED, ROW_RULES, Rows

COUNTS = (8, 4)
Function = Callable[[jax.Array], jax.Array]


def place(function: Function) -> Location:
    """Return the place of `function` of rows, traced with 8 of them and with 4."""
    shapes = (jax.ShapeDtypeStruct((count, 2), np.float32) for count in COUNTS)
    one, two = (jax.make_jaxpr(function)(shape) for shape in shapes)
    [found] = Follow(COUNTS)(one, two, [Rows(0)])
    return found


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda h: jnp.tanh(h @ jnp.ones((2, 3))), Rows(0)),
        (lambda h: jnp.sum(h, axis=1), Rows(0)),
        (lambda h: h.T, Rows(1)),
        (lambda h: h.reshape(-1), Rows(0, each=2)),
        (lambda h: h.T.reshape(-1), MIXED),
        (lambda h: h[::-1], MIXED),
        (lambda h: jnp.sort(h, axis=1), Rows(0)),
        (lambda h: jnp.sort(h, axis=0), MIXED),
        (lambda h: h @ h.T, MIXED),
        (lambda h: jnp.unstack(h.T.reshape(2, 1, 1, len(h)))[0], Rows(2)),
    ],
)
def test_rows_in_a_result(function: Function, expected: Location) -> None:
    assert place(function) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda h: jnp.sum(h * h, axis=1), Rows(0)),
        (jnp.sum, Total(0)),
        (lambda h: jnp.mean(h, axis=0), Total(-1)),
        (lambda h: h * len(h), Rows(0, power=1)),
        (lambda h: h / 8, Rows(0)),
        (lambda h: h - jnp.mean(h, axis=0), MIXED),
        (lambda h: h * jnp.sum(h), MIXED),
        (lambda h: jnp.sum(h) * jnp.sum(h), MIXED),
        (jnp.max, MIXED),
    ],
)
def test_two_traces_tell_a_mean_from_a_sum(function: Function, expected: Location) -> None:
    assert place(function) == expected


NO_RULE = """
    after_all composite create_token dce_sink empty empty2 eq_to from_edtype iota le_to lt_to
    optimization_barrier ragged_dot_general reduce rng_bit_generator rng_uniform stage tie tile
    to_edtype"""
"""Primitives without a rule: tokens, and those of other rooms or after which rows are unknown."""


def test_every_primitive_of_this_jax_has_a_rule_or_is_known_to_have_none() -> None:
    """A false alarm otherwise: jax 0.12 differentiates tanh with the new `one_minus_square`."""
    found = {each.name for each in vars(lax).values() if isinstance(each, Primitive)}
    assert found - ROW_RULES.keys() - set(NO_RULE.split()) == set()


def test_the_derivative_of_tanh_is_of_each_row() -> None:
    assert place(jax.grad(lambda h: jnp.sum(jnp.tanh(h) ** 2))) == Rows(0)

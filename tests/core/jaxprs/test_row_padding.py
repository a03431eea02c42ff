"""Rows that weigh nothing are found in a jaxpr, and padding that may count is never missed."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from replicax.core.jaxprs.row_counts import GIVEN, RowCount, Total
from replicax.core.jaxprs.row_dependence import Follow
from replicax.core.jaxprs.row_padding import COUNTED, WEIGHTS, Along, Padded
from replicax.core.jaxprs.row_rules import MIXED

ROWS, REAL = 6, 4
INF = jnp.inf


def place_of(function: Any) -> Any:
    """Trace `function(x [rows, 3], y [rows], real [rows], w [3])` with 6 and 4 rows."""
    one, two = (
        jax.make_jaxpr(function)(jnp.ones((rows, 3)), jnp.ones(rows), jnp.ones(rows), jnp.ones(3))
        for rows in (ROWS, REAL)
    )
    rows = Padded((Along(0, 1),))
    [place] = Follow((ROWS, REAL), pads=True)(one, two, [rows, rows, WEIGHTS, GIVEN])
    return place


@jax.custom_vjp
def straight(score: Any, real: Any) -> Any:
    """Return the largest real score; its gradient is that of a softmax over all."""
    return jnp.max(jnp.where(real > 0, score, -INF))


straight.defvjp(
    lambda score, real: (straight(score, real), score),
    lambda score, g: (g * jax.nn.softmax(score), None),
)


@jax.custom_vjp
def clipped(score: Any, real: Any) -> Any:
    return jnp.sum(score * real)


clipped.defvjp(
    lambda score, real: (clipped(score, real), real),
    lambda real, g: (jnp.clip(g, -1, 1) * real, None),
)

LEFT_OUT = {
    "sum": lambda x, y, r, w: jnp.sum(y * r),
    "mean": lambda x, y, r, w: jnp.sum((x @ w) * r) / jnp.sum(r),
    "mean of a mean": lambda x, y, r, w: jnp.mean((x @ w) * r) / jnp.mean(r),
    "where": lambda x, y, r, w: jnp.var(x @ w, where=r > 0),
    "product": lambda x, y, r, w: jnp.prod(jnp.where(r > 0, y, 1.0)),
    "largest": lambda x, y, r, w: jnp.max(jnp.where(r > 0, x @ w, -INF)),
    "smallest": lambda x, y, r, w: jnp.min(x @ w, where=r > 0, initial=INF),
    "largest size": lambda x, y, r, w: jnp.max(jnp.max(jnp.abs(x * w), axis=1) * r),
    "any": lambda x, y, r, w: jnp.any((y > 5) & (r > 0)),
    "all": lambda x, y, r, w: jnp.all((y > 5) | (r == 0)),
    "logsumexp": lambda x, y, r, w: jax.nn.logsumexp(x @ w, b=r),
    "softmax": lambda x, y, r, w: jnp.sum(jax.nn.softmax(jnp.where(r > 0, x @ w, -INF)) * y),
    "log of weights": lambda x, y, r, w: jax.nn.logsumexp(x @ w + jnp.log(r)),
    "covariance": lambda x, y, r, w: (x * r[:, None]).T @ (x * w),
    "pairs": lambda x, y, r, w: jnp.sum((x @ x.T) * jnp.outer(r, r)),
    "gradient": lambda x, y, r, w: jax.grad(lambda w: jnp.sum(r * jnp.tanh(x @ w - y)))(w),
    "in a loop": lambda x, y, r, w: jax.lax.fori_loop(0, 3, lambda _, w: w + (y * r) @ x, w),
    "to codes": lambda x, y, r, w: (jax.nn.one_hot(jnp.argmax(x, 1), 3) * r[:, None]).T @ x,
    "to segments": lambda x, y, r, w: jax.ops.segment_sum(y * r, jnp.argmax(x, 1), 3),
    "a rule": lambda x, y, r, w: jnp.sum(jax.nn.silu(x @ w * r)),
    "a rule backward": lambda x, y, r, w: clipped(x @ w, r),
    "checkpoint": lambda x, y, r, w: jax.checkpoint(lambda x: jnp.sum(jnp.sin(x @ w) * r))(x),
}

KNOWN_TO_COUNT = {
    "largest": lambda x, y, r, w: jnp.max(y * r),
    "largest beside a constant": lambda x, y, r, w: jnp.max((x @ w + 100) * r),
    "smallest": lambda x, y, r, w: jnp.min(jnp.exp(y) * r),
    "position": lambda x, y, r, w: jnp.argmax(y * r),
    "sorted": lambda x, y, r, w: jnp.sort(y * r)[:3],
    "chosen": lambda x, y, r, w: jnp.max(jnp.where(r > 0, y, 0)),
    "logsumexp": lambda x, y, r, w: jax.nn.logsumexp(y * r),
    "any": lambda x, y, r, w: jnp.any(y * r == 0),
    "padding": lambda x, y, r, w: jnp.sum(1 - r),
}

OPEN = {
    "largest of all": lambda x, y, r, w: jnp.max(y) * jnp.sum(r),
    "softmax of all": lambda x, y, r, w: jnp.sum(jax.nn.softmax(y) * r),
    "sum of some": lambda x, y, r, w: jnp.sum(y * r) + 0.01 * jnp.mean(y),
    "no derivative": lambda x, y, r, w: jnp.sum(jnp.sqrt(jnp.abs(y) * r)),
    "0 times infinity": lambda x, y, r, w: jnp.sum(
        jnp.where(r[None] > 0, x @ x.T, -INF) * r[:, None], axis=0
    ).max(where=r > 0, initial=-INF),
    "backward": lambda x, y, r, w: straight(x @ w, r),
    "a large number": lambda x, y, r, w: jnp.max(jnp.where(r > 0, y, -1e9)),
    "cumulative": lambda x, y, r, w: jnp.sum(jnp.cumsum(y)[::-1] * r),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_padding_is_left_out(name: str) -> None:
    assert not place_of(LEFT_OUT[name])


@pytest.mark.parametrize("name", KNOWN_TO_COUNT)
def test_padding_counts(name: str) -> None:
    assert place_of(KNOWN_TO_COUNT[name]) == COUNTED


@pytest.mark.parametrize("name", OPEN)
def test_padding_may_count(name: str) -> None:
    assert place_of(OPEN[name]) in (MIXED, Total(-1))


def test_a_mean_over_all_rows_divides_by_their_number() -> None:
    assert place_of(lambda x, y, r, w: jnp.mean(y * r)) == RowCount(-1)

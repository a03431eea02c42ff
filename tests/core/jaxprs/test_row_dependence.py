"""Rows that stay apart are found in a jaxpr, and rows that may meet are never missed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from replicax.core.jaxprs.row_counts import FROM_STEP_KEY, Ratio, RowCount, Total
from replicax.core.jaxprs.row_dependence import Follow, Unlike
from replicax.core.jaxprs.row_rules import MIXED, Rows

ROWS = 6
X = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 4, 5)), jnp.float32)
LABELS = jnp.arange(ROWS) % 4
TABLE = jnp.ones((4, 5))


def rows_of(function: Any) -> list[Any]:
    """Trace `function(x [rows, 4, 5], labels [rows], key)` with 6 and 12 rows, and follow rows."""
    one, two = (
        jax.make_jaxpr(function)(jnp.ones((rows, 4, 5)), jnp.arange(rows) % 4, *given(function))
        for rows in (ROWS, 2 * ROWS)
    )
    return Follow((ROWS, 2 * ROWS))(
        one, two, [Rows(0), Rows(0), *(FROM_STEP_KEY for _ in given(function))]
    )


def given(function: Any) -> list[jax.Array]:
    """Return a key if the function takes one."""
    return [jax.random.key(0)] * (function.__code__.co_argcount == 3)


def attention(x: Any, _: Any) -> Any:
    heads = jnp.einsum("btd,de->bte", x, jnp.ones((5, 6))).reshape(-1, 4, 2, 3)
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads, heads)
    mask = jnp.tril(jnp.ones((4, 4), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, heads).reshape(-1, 4, 6)


def recurrent(x: Any, _: Any) -> Any:
    def step(carry: Any, now: Any) -> Any:
        carry = jnp.tanh(carry @ jnp.ones((5, 5)) + now)
        return carry, carry.sum(1)

    last, all_of = lax.scan(step, jnp.zeros((len(x), 5)), jnp.swapaxes(x, 0, 1))
    return last, all_of.T


@jax.custom_vjp
def solved(x: Any, times: Any) -> Any:
    """As a solver of diffrax does, refuse derivatives by its times."""
    return x * jnp.sum(times)


def _solved(x: Any, times: Any) -> tuple[Any, Any]:
    if times.perturbed:
        raise RuntimeError("unexpected tangent")
    return x.value * jnp.sum(times.value), times.value


solved.defvjp(_solved, lambda times, g: (g * jnp.sum(times), None), symbolic_zeros=True)


APART = {
    "a solver": lambda x, _: solved(x, jnp.linspace(0.0, 1.0, 5)),
    "dense": lambda x, _: jax.nn.gelu(x @ TABLE.T),
    "cross-entropy": lambda x, t: optax.softmax_cross_entropy_with_integer_labels(x[:, 0], t),
    "embedding": lambda _, t: TABLE[t].sum(-1),
    "own entry replaced": lambda x, t: jax.vmap(lambda row, n: row.at[n].set(-row[0]))(
        x[:, :, 0], t
    ),
    "one-hot": lambda x, t: jax.nn.one_hot(t, 5) * x[:, 0],
    "own entry": lambda x, t: jnp.take_along_axis(x[:, :, 0], t[:, None], 1),
    "some columns": lambda x, _: x[:, jnp.array([0, 2])],
    "layer norm": lambda x, _: (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True),
    "attention": attention,
    "recurrent": recurrent,
    "rows and positions in one dim": lambda x, _: jnp.tanh(x.reshape(-1, 5)).reshape(-1, 4, 5),
    "vmap": lambda x, t: jax.vmap(lambda row, label: row[0] * label)(x, t),
    "checkpoint": lambda x, _: jax.checkpoint(lambda v: jnp.sin(v) ** 2)(x),
    "custom gradients": lambda x, _: jax.nn.relu(x) + jax.nn.silu(x),
    "branch": lambda x, _: lax.cond(True, jnp.sin, jnp.cos, x),
    "while": lambda x, _: lax.fori_loop(0, 3, lambda i, v: v * 2, x),
    "sorted within": lambda x, _: jnp.sort(x, axis=1) + lax.top_k(x, 5)[0],
    "padded within": lambda x, _: jnp.pad(x, ((0, 0), (1, 1), (0, 0)))[:, 1:-1],
    "moved": lambda x, _: jnp.moveaxis(jnp.moveaxis(x, 0, 2) * 2, 2, 0),
    "cumulative within": lambda x, _: jnp.cumsum(x, axis=1),
    "convolution": lambda x, _: lax.conv(x, jnp.ones((3, 4, 2)), (1,), "SAME"),
    "pooled": lambda x, _: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 1, 1), "SAME"),
    "own entry by number": lambda x, t: x[jnp.arange(len(t)), t],
    "drawn": lambda x, _, key: x * jax.random.normal(key, x.shape),
    "a key for each": lambda x, _, key: jax.vmap(jax.random.normal)(jax.random.split(key, len(x))),
    "solved by one matrix": lambda x, _: lax.linalg.triangular_solve(TABLE[:, :4], x[:, 0, :4]),
    "solved by a factor": lambda x, _: (
        jax.scipy.linalg.cho_solve((TABLE[:, :4] + jnp.eye(4), True), x[:, :, 0].T).T
    ),
    "solved": lambda x, _: jnp.linalg.solve(TABLE[:, :4] + jnp.eye(4), x[:, :, 0].T).T,
    "sign of a mean's share": lambda x, _: jnp.sign(x / len(x)),
    "whether a mean's share is positive": lambda x, _: jnp.where(x / len(x) > 0, 1.0, -1.0),
    "a mean's share by its norm": lambda x, _: (
        (x / len(x)) / jnp.linalg.norm(x / len(x), axis=1, keepdims=True)
    ),
    "a mean's share by its largest": lambda x, _: (
        (x / len(x)) ** 3 / jnp.max(jnp.abs(x / len(x)), axis=1, keepdims=True) ** 3
    ),
    "linear algebra of each": lambda x, _: jnp.linalg.cholesky(x @ jnp.swapaxes(x, 1, 2)),
    "constant": lambda x, _: jnp.ones((len(x), 2)),
}

MET = {
    "a solver that refuses": lambda x, _: solved(1.0, x),
    "mean": lambda x, _: x - x.mean(0),
    "logits of all": lambda x, _: x[:, 0] @ x[:, 0].T,
    "divided by the square of their number": lambda x, _: x / len(x) ** 2 * len(x),
    "numbered": lambda x, _: x[:, 0, 0] * jnp.arange(len(x)),
    "largest of all": lambda x, _: jnp.max(x),
    "root of the mean": lambda x, _: jnp.sqrt(jnp.mean(x)),
    "to the power of their number": lambda x, _: x ** len(x),
    "as often as there are": lambda x, _: lax.fori_loop(0, len(x), lambda i, v: v * 2, x),
    "as often as there are, of none": lambda x, _: (
        x[:, 0, 0] * lax.fori_loop(0, len(x), lambda i, v: v / 2, 1.0)
    ),
    "whole parts of their number": lambda x, t: lax.div(t, len(t)) * len(t),
    "one less than their number": lambda x, _: x / (len(x) - 1),
    "shuffled": lambda x, _, key: jax.random.permutation(key, x),
    "drawn from a constant": lambda x, _: x * jax.random.normal(jax.random.key(0), x.shape),
    "largest": lambda x, _: x / jnp.max(x),
    "reversed": lambda x, _: x[::-1],
    "rolled": lambda x, _: jnp.roll(x, 1, axis=0),
    "shifted": lambda x, _: jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:-1],
    "cumulative": lambda x, _: jnp.cumsum(x, axis=0),
    "sorted": lambda x, _: jnp.sort(x, axis=0),
    "permuted": lambda x, _: x[jnp.array([1, 0, 2, 3, 4, 5])],
    "picked by labels": lambda x, t: x[t],
    "scan over rows": lambda x, _: lax.scan(lambda c, v: (c + v, c), jnp.zeros((4, 5)), x)[1],
    "while a row lives": lambda x, _: lax.while_loop(lambda v: v[0, 0, 0] < 9, lambda v: v + 1, x),
    "halves": lambda x, _: x.reshape(2, -1, 4, 5).sum(0),
    "transposed against itself": lambda x, _: x[:, :, 0] * x[:4, 0, 0],
    "linear algebra": lambda x, _: jnp.linalg.inv(x[:4, :, :4]),
    "fourier": lambda x, _: jnp.fft.fft(x, axis=0).real,
    "a window over rows": lambda x, _: lax.reduce_window(
        x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), "SAME"
    ),
}


@pytest.mark.parametrize("name", APART)
def test_rows_stay_apart(name: str) -> None:
    assert set(rows_of(APART[name])) <= {Rows(0), None}


@pytest.mark.parametrize("name", MET)
def test_rows_may_have_met(name: str) -> None:
    assert set(rows_of(MET[name])) & {MIXED, Rows(0, power=-1)}


NUMBERS = {
    "sum": (lambda x, _: jnp.sum(x), Total(0)),
    "mean": (lambda x, _: jnp.mean(x), Total(-1)),
    "mean and a constant": (lambda x, _: 2 * jnp.mean(x, (0, 1)) + 1, Total(-1)),
    "sum over their number": (lambda x, _: jnp.vdot(x, x) / len(x), Total(-1)),
    "accuracy": (lambda x, t: jnp.mean(jnp.argmax(x[:, 0], 1) == t), Total(-1)),
    "weighted mean": (lambda x, t: jnp.average(x[:, 0, 0], weights=1.0 * t), Ratio()),
    "count": (lambda x, _: jnp.sum(x > 0), Total(0)),
    "each over their number": (lambda x, _: x / len(x), Rows(0, power=-1)),
    "weights that add up to 1": (
        lambda x, t: jnp.sum(x[:, 0, 0] * jnp.full(len(t), 1 / len(t))),
        Total(-1),
    ),
    "a constant over their number": (lambda x, _: jnp.float32(3 / len(x)), RowCount(-1)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_sums_and_means_are_told_apart(name: str) -> None:
    function, place = NUMBERS[name]
    assert rows_of(function) == [place]


def test_traces_that_do_not_correspond_tell_nothing() -> None:
    with pytest.raises(Unlike):
        rows_of(lambda x, _: sum(x[i] for i in range(len(x))))


@pytest.mark.parametrize("name", APART)
def test_what_is_apart_is_apart_in_numbers(name: str) -> None:
    """Changing the first row changes nothing in the others."""
    key = given(APART[name])
    before = APART[name](X, LABELS, *key)
    after = APART[name](X.at[0].add(1.0), LABELS.at[0].add(1), *key)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[1:], b[1:]), before, after)


def test_an_index_of_rows_is_one_in_64_bits() -> None:
    def own_entry(x: Any, labels: Any) -> Any:
        return x[jnp.arange(len(x)), labels.astype(jnp.int32)]

    with jax.enable_x64(True):
        assert rows_of(own_entry) == [Rows(0)]

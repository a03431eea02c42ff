"""Payloads of an island, its residual, the weighted mean, and the outer step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.rounds import MODEL, assert_same, on, over

from replicax.core.between.arithmetic import Arithmetic, IslandState
from replicax.core.between.rounds import OuterSGD
from replicax.core.ground.codecs import CODECS
from replicax.core.ground.vectors import as_blocks

RNG = np.random.default_rng(2)


def arithmetic_of(dp: Any) -> Arithmetic:
    dp.init(MODEL)
    found: Arithmetic = dp.program(MODEL).step.arithmetic
    return found


def moved(own: IslandState, scale: float = 0.1, weight: float = 1.0) -> IslandState:
    """Return the state of an island whose parameters have changed at random."""
    params = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(RNG.normal(size=leaf.shape) * scale, jnp.float32),
        own.inner.params,
    )
    return dataclasses.replace(
        own,
        inner=dataclasses.replace(own.inner, params=params),
        weights=jnp.full_like(own.weights, weight),
    )


def island(dp: Any) -> IslandState:
    state = dp.init(MODEL)
    found: IslandState = jax.tree.map(lambda leaf: leaf[0], state.islands)
    return found


def test_the_outer_step_is_that_of_pytorch() -> None:
    dp = on(1, over(2, outer=OuterSGD(2, CODECS["float32"], 0.7, 0.9)))
    arithmetic = arithmetic_of(dp)
    params, opt_state = MODEL, arithmetic.outer_state(MODEL)
    buffers = {name: np.zeros(leaf.shape) for name, leaf in MODEL.items()}
    wanted = {name: np.asarray(leaf, np.float64) for name, leaf in MODEL.items()}
    step = jax.jit(arithmetic.stepped, static_argnums=4)
    for _ in range(5):
        recorded = {n: RNG.normal(size=leaf.shape).astype(np.float32) for n, leaf in MODEL.items()}
        sums = as_blocks(recorded)[0] * 3.0, jnp.asarray([3.0, 1.0, 1.0, 1.0])
        params, opt_state, _, _ = step(params, opt_state, {}, sums, 0)
        for name, gradient in recorded.items():
            buffers[name] = 0.9 * buffers[name] + gradient
            wanted[name] -= 0.7 * (gradient + 0.9 * buffers[name])
    for name, value in wanted.items():
        np.testing.assert_allclose(np.asarray(params[name]), value, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("send", CODECS)
def test_what_is_sent_and_what_remains_are_what_there_was(send: str) -> None:
    dp = on(1, over(2, send=send))
    arithmetic, own, codec = arithmetic_of(dp), moved(island(dp)), CODECS[send]
    send_it = jax.jit(arithmetic.sent, static_argnums=2)
    before = np.zeros(as_blocks(MODEL)[0].size, np.float32)
    for _ in range(3):
        (residual, (weights, _)), payload, exact = send_it(own, MODEL, 0)
        assert payload.nbytes == arithmetic.payload_bytes(MODEL)
        decay = 0.95 if send == "sparse" else 1.0
        difference = np.asarray(as_blocks(MODEL)[0] - as_blocks(own.inner.params)[0])
        there_was = np.float32(decay) * before + difference
        decoded = np.asarray(codec.decode(payload, before.size))
        left = np.asarray(residual[0]) if residual else np.zeros_like(decoded)
        np.testing.assert_allclose(left + decoded, there_was, rtol=1e-6, atol=1e-7)
        assert (float(exact[0]), float(weights[0])) == (1.0, 0.0)
        before = left
        own = moved(dataclasses.replace(own, residual=residual))
    assert bool(before.any()) == (send != "float32")


def test_islands_are_weighted_by_their_rows() -> None:
    dp = on(1, over(2))
    arithmetic, first = arithmetic_of(dp), island(dp)
    islands = [moved(first, weight=3.0), moved(first, weight=1.0), moved(first, weight=0.0)]
    sums = arithmetic.nothing(MODEL, {}, 0)
    for own in islands:
        _, payload, exact = arithmetic.sent(own, MODEL, 0)
        sums = arithmetic.added(sums, payload, exact)
    params, _, _, _ = arithmetic.stepped(MODEL, arithmetic.outer_state(MODEL), {}, sums, 0)
    for name, leaf in MODEL.items():
        one, other = (np.asarray(own.inner.params[name]) for own in islands[:2])
        np.testing.assert_allclose(params[name], 0.75 * one + 0.25 * other, rtol=1e-5, atol=1e-6)
        assert not np.array_equal(leaf, params[name])


def test_a_round_without_rows_changes_nothing() -> None:
    dp = on(1, over(2))
    arithmetic, own = arithmetic_of(dp), moved(island(dp), weight=0.0)
    _, payload, exact = arithmetic.sent(own, MODEL, 0)
    sums = arithmetic.added(arithmetic.nothing(MODEL, {}, 0), payload, exact)
    params, *_ = arithmetic.stepped(MODEL, arithmetic.outer_state(MODEL), {}, sums, 0)
    assert_same(params, MODEL)


def test_fragments_are_a_partition_in_equal_sizes() -> None:
    arithmetic = arithmetic_of(on(1, over(4, fragments=2)))
    parts = [sorted(name for name, leaf in arithmetic.fragment(MODEL, n).items()
                    if isinstance(leaf, jax.Array)) for n in range(2)]  # fmt: skip
    assert parts == [["a", "b"], ["c"]]
    assert_same(arithmetic.merged(MODEL, arithmetic.fragment(MODEL, 1)), MODEL)


def test_frozen_parameters_are_not_sent() -> None:
    dp = on(1, over(2, send="int8"), trainable="a|b")
    arithmetic = arithmetic_of(dp)
    assert arithmetic.trained == (True, True, False)
    assert arithmetic.payload_bytes(MODEL) == 66 + 66
    assert isinstance(arithmetic.fragment(MODEL, 0)["c"], optax.MaskedNode)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_decay_is_the_factor_of_the_residual(decay: float) -> None:
    dp = on(1, over(2, send="int4", decay=decay))
    arithmetic, own = arithmetic_of(dp), moved(island(dp))
    residual = jnp.asarray(RNG.normal(size=own.residual[0].shape), jnp.float32)
    (left, _), payload, _ = arithmetic.sent(
        dataclasses.replace(own, residual=(residual,)), MODEL, 0
    )
    acc = decay * residual + as_blocks(MODEL)[0] - as_blocks(own.inner.params)[0]
    decoded = CODECS["int4"].decode(payload, residual.size)
    np.testing.assert_allclose(left[0] + decoded, acc, rtol=1e-5, atol=1e-6)

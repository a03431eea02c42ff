"""The blocked attention against float64 NumPy and JAX's own, in value and in every gradient."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiers import only

from replicax.recipes import cpu, transformer
from replicax.recipes.transformer import _attention as causal_attention
from replicax.remat import products_and_attention, with_attention

BLOCKS = {256: 4, 64: 2, 37: 1, 1: 1}
"""Number of blocks for a number of tokens."""


def inputs(tokens: int, dtype: Any = jnp.float32) -> list[jax.Array]:
    """Queries, keys, values and what the output is weighted with, `[2, tokens, 3, 8]`."""
    random = np.random.default_rng(tokens)
    return [jnp.asarray(random.normal(size=(2, tokens, 3, 8)), dtype) for _ in range(4)]


def with_gradients(q: jax.Array, k: jax.Array, v: jax.Array, weight: jax.Array) -> list[jax.Array]:
    attended, pullback = jax.vjp(causal_attention, q, k, v)
    return [attended, *pullback(weight)]


def in_float64(*arrays: jax.Array) -> list[np.ndarray]:
    """Attention by the textbook: softmax of the scores, and its derivative written out."""
    q, k, v, weight = (np.moveaxis(np.asarray(x, np.float64), 1, 2) for x in arrays)
    scale = q.shape[-1] ** -0.5
    scores = np.where(np.tri(q.shape[2], dtype=bool), q @ k.swapaxes(2, 3) * scale, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    d_p = weight @ v.swapaxes(2, 3)
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdims=True)) * scale
    found = (p @ v, d_scores @ k, d_scores.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ weight)
    return [np.moveaxis(x, 2, 1) for x in found]


def of_jax(q: jax.Array, k: jax.Array, v: jax.Array, weight: jax.Array) -> list[jax.Array]:
    def plain(*qkv: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(*qkv, is_causal=True)

    attended, pullback = jax.vjp(plain, q, k, v)
    return [attended, *pullback(weight)]


def agree(found: Any, expected: Any, bound: float) -> None:
    for name, actual, wanted in zip(("o", "dq", "dk", "dv"), found, expected, strict=True):
        actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
        assert actual.shape == wanted.shape
        # With one token all weights are 1, so the gradients of q and k are 0.
        difference = np.abs(actual - wanted).max() / max(np.abs(wanted).max(), 0.1)
        assert difference <= bound, f"{name} differs by {difference:.1e}"


@pytest.mark.parametrize("tokens", only([64, 37], BLOCKS))
def test_it_is_softmax_attention(tokens: int) -> None:
    assert len(list(cpu._blocks(tokens))) == BLOCKS[tokens]
    arrays = inputs(tokens)
    found = jax.jit(with_gradients)(*arrays)
    assert {each.dtype for each in found} == {jnp.dtype(jnp.float32)}
    agree(found, in_float64(*arrays), 1e-5)
    agree(found, jax.jit(of_jax)(*arrays), 1e-5)


def test_bfloat16_is_rounded_once() -> None:
    arrays = inputs(64, jnp.bfloat16)
    found = jax.jit(with_gradients)(*arrays)
    assert {each.dtype for each in found} == {jnp.dtype(jnp.bfloat16)}
    agree(found, in_float64(*arrays), 2**-8)


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        arrays = inputs(64, jnp.float64)
        found = jax.jit(with_gradients)(*arrays)
        assert {each.dtype for each in found} == {jnp.dtype(jnp.float64)}
        agree(found, in_float64(*arrays), 1e-13)


@pytest.mark.parametrize("tokens", only([64], [64, 37]))
def test_a_token_does_not_see_those_after_it(tokens: int) -> None:
    q, k, v, _ = inputs(tokens)
    before = jax.jit(causal_attention)(q, k, v)
    for seen in {1, tokens // 4, tokens // 4 + 1, tokens - 1}:
        later = (jnp.arange(tokens) >= seen)[:, None, None]
        after = jax.jit(causal_attention)(*(jnp.where(later, 7 * x + 1, x) for x in (q, k, v)))
        np.testing.assert_array_equal(after[:, :seen], before[:, :seen])
        assert (after[:, seen:] != before[:, seen:]).any(-1).all()


def test_large_scores_do_not_overflow() -> None:
    q, k, v, weight = inputs(64)
    found = jax.jit(with_gradients)(1e4 * q, 1e4 * k, v, weight)
    assert all(np.isfinite(each).all() for each in found)
    # The largest score takes all the weight, up to the precision of float32 near 1e8.
    chosen = np.abs(np.asarray(found[0])[:, :, None] - np.asarray(v)[:, None]).max(-1).min(2)
    assert (chosen < 1e-6).mean() > 0.99


def test_what_remat_is_told_to_keep_is_not_computed_again() -> None:
    q, k, v, _ = inputs(64)

    def exponentials(policy: Any) -> int:
        kept = jax.checkpoint(causal_attention, policy=policy)
        step = jax.jit(jax.value_and_grad(lambda q: kept(q, k, v).sum()))
        return step.trace(q).lower(lowering_platforms=("cpu",)).as_text().count("exponential")

    everything = exponentials(jax.checkpoint_policies.everything_saveable)
    assert everything == 2 * BLOCKS[64]  # forward, and again from the log of their sum
    assert exponentials(jax.checkpoint_policies.nothing_saveable) > everything
    assert exponentials(products_and_attention) == everything
    named = jax.checkpoint_policies.save_only_these_names("dense")
    assert exponentials(named) > everything
    assert exponentials(with_attention(named)) == everything


def test_without_cuda_the_gpus_branch_is_the_plain_one() -> None:
    arrays = inputs(64, jnp.bfloat16)[:3]
    assert not transformer.cudnn_takes(arrays[0])
    plain, on_cuda = (
        str(jax.make_jaxpr(each)(*arrays))
        for each in (transformer._plain_attention, transformer._cuda_attention)
    )
    assert plain == on_cuda


@pytest.mark.parametrize(
    ("platform", "dtype"),
    only(
        [("cuda", jnp.bfloat16), ("tpu", jnp.float32)],
        itertools.product(["cuda", "tpu"], [jnp.float32, jnp.bfloat16]),
    ),
)
def test_it_lowers_for_an_accelerator_without_one(platform: str, dtype: Any) -> None:
    arrays = inputs(256, dtype)
    traced = jax.jit(with_gradients).trace(*arrays)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    # All scores in one product; on a CPU a quarter of the queries at a time.
    assert "tensor<2x3x256x256x" in text
    assert "tensor<2x3x256x256x" not in traced.lower(lowering_platforms=("cpu",)).as_text()

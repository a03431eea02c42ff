"""Causal self-attention, and a form of it that XLA's CPU backend runs more than twice as fast.

On a GPU or TPU it is `jax.nn.dot_product_attention`, as cuDNN's kernel where that takes the inputs.
On a CPU that function computes the half of the scores that the mask throws away, and keeps the
probabilities for a backward pass that sums over them. Here the queries are cut into blocks that see
the keys up to their own end, and the backward pass is FlashAttention's (Dao et al., 2022,
arXiv:2205.14135): it has the probabilities again from the log of their sum, and takes the sum over
the keys from the output.
"""

from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from replicax.core.precision import to_sum
from replicax.core.traced_for import cuda_capability
from replicax.remat import ATTENTION

LEAST_BLOCK = 32
"""Query tokens below which a block's matrix products are too small to be worth their saving."""

Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention in which a token sees itself and those before it.

    Args:
        q: queries `[rows, tokens, heads, head_dim]`.
        k: keys of the same shape and dtype.
        v: values of the same shape and dtype.

    Returns:
        `[rows, tokens, heads, head_dim]`, of the same dtype.
    """
    attended: jax.Array = lax.platform_dependent(
        q, k, v, cpu=_attention_on_cpu, cuda=_attention_on_cuda, default=_attention
    )
    return attended


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def _attention_on_cuda(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    # JAX never chooses cuDNN by itself, and raises where cuDNN does not take the inputs.
    implementation: Literal["cudnn"] | None = "cudnn" if cudnn_takes(q) else None
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)


def cudnn_takes(q: jax.Array) -> bool:
    """Whether cuDNN's flash attention is there for such queries."""
    ampere_or_newer = (cuda_capability() or 0) >= 8
    head_dim = q.shape[-1]
    return ampere_or_newer and q.dtype.itemsize == 2 and head_dim <= 128 and head_dim % 8 == 0


def _attention_on_cpu(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    # XLA:CPU has no fast products of 16-bit floats.
    heads_first = (to_sum(jnp.moveaxis(x, 1, 2)) for x in (q, k, v))
    return jnp.moveaxis(_blocked(*heads_first), 1, 2).astype(q.dtype)


@jax.custom_vjp
def _blocked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _forward(q, k, v)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Residuals]:
    """All arrays are `[rows, heads, tokens, head_dim]`."""
    outputs, logs = [], []
    for queries, keys, mask in _blocks(q.shape[2]):
        scores = _scores(q[:, :, queries], k[:, :, keys])
        scores = jnp.where(mask, scores, -jnp.inf)
        highest = jnp.max(scores, axis=-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        outputs.append(jnp.einsum("bnts,bnsh->bnth", weights, v[:, :, keys]) / total)
        logs.append(highest + jnp.log(total))
    output = checkpoint_name(jnp.concatenate(outputs, axis=2), ATTENTION)
    log_total = checkpoint_name(jnp.concatenate(logs, axis=2), ATTENTION)
    return output, (q, k, v, output, log_total)


def _backward(kept: Residuals, d_output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, output, log_total = kept
    # sum over keys of p * dp, which is the same as this sum over the head's dims.
    from_total = jnp.sum(d_output * output, axis=-1, keepdims=True)
    d_q, d_k, d_v = [], jnp.zeros_like(k), jnp.zeros_like(v)
    for queries, keys, mask in _blocks(q.shape[2]):
        scores = _scores(q[:, :, queries], k[:, :, keys])
        p = jnp.where(mask, jnp.exp(scores - log_total[:, :, queries]), 0)
        d_p = jnp.einsum("bnth,bnsh->bnts", d_output[:, :, queries], v[:, :, keys])
        d_scores = p * (d_p - from_total[:, :, queries]) * q.shape[-1] ** -0.5
        d_q.append(jnp.einsum("bnts,bnsh->bnth", d_scores, k[:, :, keys]))
        d_k += _to_all_keys(jnp.einsum("bnts,bnth->bnsh", d_scores, q[:, :, queries]), k)
        d_v += _to_all_keys(jnp.einsum("bnts,bnth->bnsh", p, d_output[:, :, queries]), v)
    return jnp.concatenate(d_q, axis=2), d_k, d_v


_blocked.defvjp(_forward, _backward)


def _blocks(tokens: int) -> Iterator[tuple[slice, slice, Any]]:
    """Queries, the keys up to their end, and the mask `[queries, keys]` between them."""
    fits = (n for n in (4, 2) if tokens % n == 0 and tokens // n >= LEAST_BLOCK)
    size = tokens // next(fits, 1)
    for start in range(0, tokens, size):
        end = start + size
        mask = jnp.arange(start, end)[:, None] >= jnp.arange(end)
        yield slice(start, end), slice(0, end), mask


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return jnp.einsum("bnth,bnsh->bnts", q * q.shape[-1] ** -0.5, k)


def _to_all_keys(d_keys: jax.Array, keys: jax.Array) -> jax.Array:
    missing = keys.shape[2] - d_keys.shape[2]
    return jnp.pad(d_keys, ((0, 0), (0, 0), (0, missing), (0, 0)))

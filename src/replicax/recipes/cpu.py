"""Implementations of three layers that XLA's CPU backend runs faster than the standard ones.

A model uses the standard layer and selects the CPU implementation with `platform_dependent`:

    >>> lax.platform_dependent(q, k, v, cpu=cpu.causal_attention, default=ordinary_attention)

Speed-ups on two cores of an AMD EPYC (benchmarks/LOG.md, docs/benchmarks.md):

- `convolve_relu_pool`: a training step of LeNet, 256 rows on two devices, 84 -> 16 ms;
- `conv_general_dilated`: a step of the CNN with 8 micro-batches 164 -> 28 ms, in mode `exact` on
  8 devices 143 -> 22 ms; unchanged without a loop;
- `causal_attention`: more than twice as fast as `jax.nn.dot_product_attention`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from replicax.core.ground.precision import to_sum
from replicax.remat import ATTENTION

LEAST_BLOCK = 32
"""Minimum query tokens per block; smaller matrix products would cost more than they save."""

Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]
_NHWC = ("NHWC", "HWIO", "NHWC")


# Convolution, relu and average pool of small images. XLA:CPU's convolution spends most of a
# training step in its gradients, and in NHWC the patches of a convolution are many short runs.
# Here activations are [channels, height, width, rows]: with the rows innermost, a patch matrix is
# a few contiguous slabs of the image, the convolution and both of its gradients are one matrix
# product each, and pooling adds slabs. XLA removes the transposes between two such layers. Rows
# are never merged with another dimension, so a batch split over a mesh axis stays split.


def convolve_relu_pool(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Apply a convolution without padding, relu, and the mean over 2 x 2 windows.

    `x` is `[rows, height, width, in]` and `kernel` `[kh, kw, in, out]`, with the same dtype;
    products are summed in float32 or wider.
    """
    (kh, kw), (height, width) = kernel.shape[:2], x.shape[1:3]
    # Incomplete windows are dropped, and their outputs are not computed.
    height, width = (height - kh + 1) // 2 * 2, (width - kw + 1) // 2 * 2
    planes = x.transpose(3, 1, 2, 0)[:, : height + kh - 1, : width + kw - 1]
    # XLA:CPU cannot sum products of bfloat16 matrices in float32, so widen the operands.
    y = _matmul_conv(to_sum(planes), to_sum(kernel)).astype(x.dtype)
    y = jax.nn.relu(y + bias[:, None, None, None])
    # Strided slices instead of `lax.reduce_window`, because XLA:CPU fuses them with the relu.
    corners = (y[:, i::2, j::2] for i in range(2) for j in range(2))
    return (functools.reduce(jnp.add, corners) / 4).transpose(3, 1, 2, 0)


@jax.custom_vjp
def _matmul_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Compute the convolution as one matrix product of its patches with the kernel."""
    return jnp.tensordot(_as_matrix(kernel), _patches(x, kernel), axes=(0, 0))


def _matmul_conv_backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the input and the kernel. grad: `[out, height, width, rows]`."""
    x, kernel = saved
    kh, kw, channels, _ = kernel.shape
    patches = _patches(x, kernel)
    kernel_grad = jnp.tensordot(patches, grad, axes=((1, 2, 3), (1, 2, 3)))
    # In this order the patches are freed before their equally large gradient is allocated. Steps
    # with temporary memory under glibc's 32 MiB mmap threshold avoid repeated page faults.
    kernel_grad, grad = lax.optimization_barrier((kernel_grad, grad))
    patches_grad = jnp.tensordot(_as_matrix(kernel), grad, axes=(1, 0))
    # Written out, because autodiff would pad all kh * kw slabs to full size before adding them.
    x_grad = jnp.zeros_like(x)
    for tap in range(kh * kw):
        start = (0, tap // kw, tap % kw, 0)
        slab = patches_grad[tap * channels : (tap + 1) * channels]
        slab += lax.dynamic_slice(x_grad, start, slab.shape)
        x_grad = lax.dynamic_update_slice(x_grad, slab, start)
    return x_grad, kernel_grad.reshape(kernel.shape)


_matmul_conv.defvjp(lambda x, kernel: (_matmul_conv(x, kernel), (x, kernel)), _matmul_conv_backward)


def _patches(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Gather the inputs that each output's kernel covers: `[kh * kw * in, height, width, rows]`."""
    kh, kw = kernel.shape[:2]
    height, width = x.shape[1] - kh + 1, x.shape[2] - kw + 1
    # Two steps, the second of which copies whole planes, take half the time of kh * kw slices.
    columns = jnp.concatenate([x[:, :, j : j + width] for j in range(kw)])
    return jnp.concatenate([columns[:, i : i + height] for i in range(kh)])


def _as_matrix(kernel: jax.Array) -> jax.Array:
    return kernel.reshape(-1, kernel.shape[-1])


# XLA:CPU has a fast convolution only for operands in NHWC and HWIO order. It rewrites other
# convolutions, including both gradients, into that order, but not inside a loop such as the one
# over micro-batches. Here both gradients are written in that order.


def conv_general_dilated(
    x: jax.Array, kernel: jax.Array, strides: Any, padding: str, **_layer: Any
) -> jax.Array:
    """Apply `lax.conv_general_dilated` with stride 1, padding "SAME", NHWC, HWIO, odd kernel."""
    assert (set(strides), padding) == ({1}, "SAME"), "only these gradients are implemented"
    return _same_conv(x, kernel)


@jax.custom_vjp
def _same_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=_NHWC)


def _same_conv_backward(saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the input and the kernel. grad: `[rows, height, width, out]`."""
    x, kernel = saved
    x_grad = _same_conv(grad, jnp.flip(kernel, (0, 1)).swapaxes(2, 3))
    kernel_grad = lax.conv_general_dilated(
        x.transpose(3, 1, 2, 0),
        grad.transpose(1, 2, 0, 3),
        (1, 1),
        [(size // 2, size // 2) for size in kernel.shape[:2]],
        dimension_numbers=_NHWC,
    )
    return x_grad, kernel_grad.transpose(1, 2, 0, 3)


_same_conv.defvjp(lambda x, kernel: (_same_conv(x, kernel), (x, kernel)), _same_conv_backward)


# On a CPU, `jax.nn.dot_product_attention` computes the masked half of the scores too, and keeps
# the probabilities for the backward pass. Here the queries are split into blocks that attend to
# keys up to the end of their block, and the backward pass is FlashAttention's (Dao et al., 2022,
# arXiv:2205.14135): it recomputes the probabilities from the log of their sum, and takes the sum
# over the keys from the output.


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Apply causal attention; all arrays are `[rows, tokens, heads, head_dim]`."""
    # XLA:CPU has no fast products of 16-bit floats.
    heads_first = (to_sum(jnp.moveaxis(x, 1, 2)) for x in (q, k, v))
    return jnp.moveaxis(_blocked(*heads_first), 1, 2).astype(q.dtype)


@jax.custom_vjp
def _blocked(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _blocked_forward(q, k, v)[0]


def _blocked_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Residuals]:
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


def _blocked_backward(
    kept: Residuals, d_output: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, output, log_total = kept
    # The sum over keys of p * dp equals this sum over the head dims.
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


_blocked.defvjp(_blocked_forward, _blocked_backward)


def _blocks(tokens: int) -> Iterator[tuple[slice, slice, Any]]:
    """Yield blocks of queries, the keys up to their end, and the mask `[queries, keys]`."""
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

"""Convolution and pooling that are fast on a CPU, for small images.

Layout: activations are `[channels, height, width, rows]`, the rows of the batch innermost. On a
CPU, XLA's own convolution spends most of a training step in its gradients, and every other layout
makes the patches of a convolution a scatter of short runs. With the rows innermost a patch matrix
is a few contiguous slabs of the image, the convolution and both of its gradients are one matrix
product each, pooling adds slabs, and a dense layer contracts the leading dim: nothing is
transposed.

The rows are never merged with another dimension, so a batch split over a mesh axis stays split.
On an accelerator the same function is `lax.conv_general_dilated`, which is what is fast there.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def conv2d(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Stride-1 convolution without padding ("VALID").

    Args:
        x: `[in, height, width, rows]`.
        kernel: `[kh, kw, in, out]`, of the same dtype.

    Returns:
        `[out, height - kh + 1, width - kw + 1, rows]`; products are summed in float32 or wider.
    """
    convolved: jax.Array = lax.platform_dependent(
        x, kernel, cpu=_conv_as_matmul, default=_conv_native
    )
    return convolved


def average_pool(x: jax.Array, size: int) -> jax.Array:
    """Mean over `size` x `size` windows, side by side; incomplete windows at the end are dropped.

    Args:
        x: `[channels, height, width, rows]`.
        size: of the window, and its stride.

    Returns:
        `[channels, height // size, width // size, rows]`.
    """
    height, width = x.shape[1] // size * size, x.shape[2] // size * size
    corners = [(i, j) for i in range(size) for j in range(size)]
    # Strided slices, not `lax.reduce_window`: XLA:CPU fuses these with the ReLU before them.
    total = functools.reduce(jnp.add, (x[:, i:height:size, j:width:size] for i, j in corners))
    return total / size**2


def _conv_native(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("CHWN", "HWIO", "CHWN")
    )


def _conv_as_matmul(x: jax.Array, kernel: jax.Array) -> jax.Array:
    # XLA:CPU has no product of bfloat16 matrices summed in float32: widen the operands.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return _matmul_conv(x.astype(wide), kernel.astype(wide)).astype(x.dtype)


@jax.custom_vjp
def _matmul_conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The `kh * kw * in` products of each output, as one matrix product with the kernel."""
    return jnp.tensordot(_as_matrix(kernel), _patches(x, kernel), axes=(0, 0))


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul_conv(x, kernel), (x, kernel)


def _backward(saved: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of the input and the kernel. grad: `[out, height, width, rows]`."""
    x, kernel = saved
    kh, kw, channels, _ = kernel.shape
    patches = _patches(x, kernel)
    kernel_grad = jnp.tensordot(patches, grad, axes=((1, 2, 3), (1, 2, 3)))
    # In this order the patches are freed before their gradient, as large, is made. A step whose
    # temporary memory stays under glibc's 32 MiB mmap limit is not paged in anew every time.
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


_matmul_conv.defvjp(_forward, _backward)


def _patches(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`[kh * kw * in, height, width, rows]`: under each output, the inputs its kernel covers."""
    kh, kw = kernel.shape[:2]
    height, width = x.shape[1] - kh + 1, x.shape[2] - kw + 1
    # In two steps, the second copies whole planes: half the time of slicing kh * kw windows.
    columns = jnp.concatenate([x[:, :, j : j + width] for j in range(kw)])
    return jnp.concatenate([columns[:, i : i + height] for i in range(kh)])


def _as_matrix(kernel: jax.Array) -> jax.Array:
    return kernel.reshape(-1, kernel.shape[-1])

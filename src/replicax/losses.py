"""Cross-entropy over large vocabularies, using little more memory than the logits.

For bfloat16 logits, `optax.softmax_cross_entropy_with_integer_labels` is exact only if they are
upcast first, and its backward pass then writes float32 logits to memory: 6.6 GB for 32,768 tokens
of GPT-2's vocabulary. Here the gradient is computed in one pass from the logits in their original
dtype and two numbers per row, and rounded once. The mathematics is the same, and so are the
gradient's bits in float32 on a CPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.ground.precision import to_sum
from replicax.core.ground.traced_for import cuda_capability

_ALIGNED = 64
"""Rows of logits are padded to a multiple of this many classes on CUDA, whose matrix products are
slow if rows are not aligned to 16 bytes."""

_Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
_KeptLinear = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of each row, in nats.

    Args:
        logits: floats `[..., classes]`; -inf for impossible classes.
        labels: integers `[...]` from 0 to `classes - 1`.

    Returns:
        `[...]` in float32, or in the logits' dtype if that is wider. Reverse-mode differentiation
        of any order is supported; forward mode (`jax.jvp`) is not.

    Examples:
        >>> import jax.numpy as jnp
        >>> nats = cross_entropy(jnp.zeros((2, 4), jnp.bfloat16), jnp.array([0, 3]))
        >>> print(nats.dtype, nats)
        float32 [1.3862944 1.3862944]
    """
    return _forward(logits, labels)[0]


def _forward(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, _Kept]:
    wide = to_sum(logits)
    highest = jnp.max(wide, axis=-1, keepdims=True)
    shifted = wide - highest
    total = jnp.sum(jnp.exp(shifted), axis=-1)
    of_label = jnp.take_along_axis(shifted, labels[..., None], axis=-1)[..., 0]
    return jnp.log(total) - of_label, (logits, labels, highest, total)


def _backward(kept: _Kept, d_nats: jax.Array) -> tuple[jax.Array, None]:
    logits, labels, highest, total = kept
    classes = lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    spread = (d_nats / total)[..., None] * jnp.exp(to_sum(logits) - highest)
    d_logits = jnp.where(classes == labels[..., None], spread - d_nats[..., None], spread)
    return d_logits.astype(logits.dtype), None


cross_entropy.defvjp(_forward, _backward)


def linear_cross_entropy(hidden: jax.Array, weights: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of `hidden @ weights.T` for each row, in nats.

    On CUDA the classes are padded internally to a multiple of 64, with zero rows whose logits are
    -inf: GPT-2's 50,257 to 50,304. The parameters are unchanged. There the backward pass, except in
    float16, does not read the logits again, which saves a quarter of their traffic.

    Args:
        hidden: floats `[rows, width]`.
        weights: `[classes, width]` of the same dtype, such as a tied embedding.
        labels: integers `[rows]` from 0 to `classes - 1`.

    Returns:
        `[rows]`, as returned by `cross_entropy`.
    """
    if cuda_capability() is None:
        return cross_entropy(hidden @ weights.T, labels)
    classes = weights.shape[0]
    padded = jnp.pad(weights, ((0, -classes % _ALIGNED), (0, 0)))
    if hidden.dtype == jnp.float16:  # the exponentials of a row add up to more than its range
        return cross_entropy(_logits(hidden, padded, classes), labels)
    return _linear(hidden, padded, labels, classes)


def _logits(hidden: jax.Array, padded: jax.Array, classes: int) -> jax.Array:
    return jnp.where(jnp.arange(len(padded)) < classes, hidden @ padded.T, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _linear(hidden: jax.Array, padded: jax.Array, labels: jax.Array, classes: int) -> jax.Array:
    """Return the cross-entropy; its backward pass reads the logits no more.

    The exponentials are written, in the logits' dtype, while they are summed. Divided by their sum
    they are the gradient, but for the label's, which is less by 1; so minus the sum of the others
    takes its place. The division is left to the rows of the two products that follow.
    """
    return _linear_forward(hidden, padded, labels, classes)[0]


def _linear_forward(
    hidden: jax.Array, padded: jax.Array, labels: jax.Array, classes: int
) -> tuple[jax.Array, _KeptLinear]:
    logits, place = _logits(hidden, padded, classes), labels[:, None]
    wide = to_sum(logits)
    highest = jnp.max(wide, axis=-1, keepdims=True)
    of_label = (to_sum(jnp.take_along_axis(logits, place, axis=-1)) - highest)[:, 0]
    is_label = lax.broadcasted_iota(labels.dtype, logits.shape, 1) == place
    exponentials = jnp.where(is_label, 0, jnp.exp(wide - highest))
    others = jnp.sum(exponentials, axis=-1)
    total = others + jnp.exp(of_label)
    # As a batched scatter: the partitioner would gather all rows for one with their numbers.
    gradient = jax.vmap(_with_value)(
        exponentials.astype(logits.dtype), labels, -others.astype(logits.dtype)
    )
    return jnp.log(total) - of_label, (gradient, total, hidden, padded)


def _with_value(row: jax.Array, label: jax.Array, value: jax.Array) -> jax.Array:
    return row.at[label].set(value)


def _linear_backward(
    classes: int, kept: _KeptLinear, d_nats: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    gradient, total, hidden, padded = kept
    scale = (d_nats / total)[:, None]
    d_hidden = scale * jnp.matmul(gradient, padded, preferred_element_type=scale.dtype)
    d_padded = gradient.T @ (scale * hidden).astype(hidden.dtype)
    return d_hidden.astype(hidden.dtype), d_padded, None


_linear.defvjp(_linear_forward, _linear_backward)

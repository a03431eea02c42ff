"""Cross-entropy over large vocabularies, in the memory of its logits.

`optax.softmax_cross_entropy_with_integer_labels` of bfloat16 logits is exact where they are
widened first, and then its backward pass writes float32 logits to memory: 6.6 GB for 32,768 tokens
of GPT-2's vocabulary. Here the gradient is computed from the logits in their own dtype and two
numbers a row, in one pass, and is rounded once. The mathematics, and in float32 on a CPU the
gradient's bits, are the same.
"""

import jax
import jax.numpy as jnp
from jax import lax

from replicax.core.precision import to_sum
from replicax.core.traced_for import cuda_capability

_ALIGNED = 64
"""Classes a row of logits is filled up to on CUDA: its products of matrices are slow for rows that
do not begin at a multiple of 16 bytes."""

_Kept = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of each row, in nats.

    Args:
        logits: floats `[..., classes]`; -inf where a class cannot be.
        labels: integers `[...]` from 0 to `classes - 1`.

    Returns:
        `[...]` in float32, or wider where the logits are. It can be differentiated once or more
        in reverse, and not forward (`jax.jvp`).

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

    On CUDA the classes are filled up to a multiple of 64 inside, by rows of 0 whose logits are
    -inf: GPT-2's 50,257 to 50,304. The parameters stay as they are.

    Args:
        hidden: floats `[rows, width]`.
        weights: `[classes, width]` of the same dtype, a tied embedding say.
        labels: integers `[rows]` from 0 to `classes - 1`.

    Returns:
        `[rows]`, as `cross_entropy` gives it.
    """
    classes = weights.shape[0]
    missing = -classes % _ALIGNED if cuda_capability() is not None else 0
    logits = hidden @ jnp.pad(weights, ((0, missing), (0, 0))).T
    if missing:
        logits = jnp.where(jnp.arange(classes + missing) < classes, logits, -jnp.inf)
    return cross_entropy(logits, labels)

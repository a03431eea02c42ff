"""What the image recipes share: pixels to floats, logits to loss and accuracy."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from replicax.core.precision import to_sum


def unit_interval(images: jax.Array, dtype: Any) -> jax.Array:
    """uint8 pixels as `dtype` from 0 to 1: on the device, so that the host moves bytes."""
    return images.astype(dtype) / 255


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Softmax cross-entropy `[rows]` of logits `[rows, classes]`, and the accuracy as a metric."""
    logits = to_sum(logits)
    values = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return values, {"accuracy": jnp.argmax(logits, axis=-1) == labels}

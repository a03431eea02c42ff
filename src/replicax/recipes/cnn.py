"""A convolutional network with BatchNorm and Dropout, in Flax NNX."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from replicax.core.ground.precision import to_sum
from replicax.errors import require
from replicax.recipes import cpu
from replicax.recipes.datasets import IMAGE, OnFashionMNIST
from replicax.recipes.recipe import Prediction
from replicax.text.arguments import Count, Int32Count

nnx = require("flax.nnx", "flax")


class Network(nnx.Module):  # type: ignore[misc, name-defined]
    """Two blocks of convolution, BatchNorm, relu, max pool; Dropout; a linear layer."""

    def __init__(self, dropout: float, rngs: Any) -> None:
        # No bias before BatchNorm, which would subtract it again.
        layer = {"kernel_size": (3, 3), "use_bias": False, "rngs": rngs}
        self.conv1 = nnx.Conv(1, 32, **layer, conv_general_dilated=cpu.conv_general_dilated)
        self.norm1 = nnx.BatchNorm(32, rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, **layer, conv_general_dilated=cpu.conv_general_dilated)
        self.norm2 = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.linear = nnx.Linear(64 * 7 * 7, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return logits `[rows, 10]` for images `[rows, 28, 28, 1]`."""
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            x = nnx.relu(norm(conv(x)))
            x = nnx.max_pool(x, window_shape=(2, 2), strides=(2, 2))
        return self.linear(self.dropout(x.reshape(x.shape[0], -1)))  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class CNN(OnFashionMNIST):
    """A CNN with BatchNorm and Dropout (Flax NNX) on Fashion-MNIST."""

    batch_size: Int32Count = 256
    """Images per global batch."""
    epochs: Count = 3
    """Passes over the training images."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    dropout: float = 0.25
    """Share of features dropped before the linear layer."""
    data_dir: Path | None = None
    """Folder with the four Fashion-MNIST files; searched for by default."""

    def model(self, key: jax.Array) -> Network:
        """Create a network."""
        return Network(self.dropout, nnx.Rngs(key))

    def loss(
        self, model: Network, batch: dict[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return cross-entropy `[rows]` and accuracy."""
        logits, labels = to_sum(_logits(model, batch["image"])), batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return losses, {"accuracy": jnp.argmax(logits, axis=-1) == labels}

    def prediction(self) -> Prediction:
        """Return the function of logits `[rows, 10]`, and the shape of an image."""
        return _logits, IMAGE

    def optimizer(self) -> optax.GradientTransformation:
        """Return Adam."""
        return optax.adam(self.learning_rate)


def _logits(model: Network, images: jax.Array) -> jax.Array:
    return model(images.astype(model.linear.kernel.dtype) / 255)

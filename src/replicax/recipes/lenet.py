"""LeNet: two convolutions with average pools and two dense layers, as a plain pytree."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jax import lax

from replicax.core.ground.precision import to_sum
from replicax.recipes import cpu
from replicax.recipes.datasets import IMAGE, OnFashionMNIST
from replicax.recipes.recipe import Prediction
from replicax.text.arguments import Count, Int32Count

Params = dict[str, dict[str, jax.Array]]

# He initialization, for kernels [height, width, in, out] and [in, out] before a relu.
_he = jax.nn.initializers.he_normal(in_axis=-2, out_axis=-1)


@dataclasses.dataclass(frozen=True)
class LeNet(OnFashionMNIST):
    """LeNet on Fashion-MNIST, as a plain pytree of arrays."""

    batch_size: Int32Count = 256
    """Images per global batch."""
    epochs: Count = 10
    """Passes over the training images."""
    learning_rate: float = 0.2
    """Peak learning rate, reached after 10% of the steps, then cosine decay to 0."""
    momentum: float = 0.9
    """Nesterov momentum."""
    clip_norm: float = 1.0
    """Maximum global norm of the gradient; larger gradients are clipped."""
    data_dir: Path | None = None
    """Folder with the four Fashion-MNIST files; searched for by default."""

    def model(self, key: jax.Array) -> Params:
        """Return He-initialized kernels `[height, width, in, out]` or `[in, out]`, zero biases."""
        shapes = {
            "conv1": (3, 3, 1, 20),
            "conv2": (5, 5, 20, 50),
            "dense1": (50 * 4 * 4, 128),
            "dense2": (128, 10),
        }
        keys = jax.random.split(key, len(shapes))
        return {
            name: {"kernel": _he(layer_key, shape), "bias": jnp.zeros(shape[-1])}
            for layer_key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def loss(
        self, model: Params, batch: dict[str, jax.Array], key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return cross-entropy `[rows]` and accuracy."""
        scores, labels = to_sum(logits(model, batch["image"])), batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        return losses, {"accuracy": jnp.argmax(scores, axis=-1) == labels}

    def prediction(self) -> Prediction:
        """Return `logits`, and the shape of an image."""
        return logits, IMAGE

    def optimizer(self) -> optax.GradientTransformation:
        """Return SGD with momentum, warmup, cosine decay and gradient clipping."""
        descent = optax.sgd(self.schedule(), momentum=self.momentum, nesterov=True)
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), descent)

    def schedule(self) -> optax.Schedule:
        """Return the learning rate as a function of the update count."""
        rows = len(self._data.train["label"])
        steps = self.epochs * -(-rows // self.batch_size)
        return optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, steps // 10, steps)


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Return logits `[rows, 10]` for uint8 images `[rows, 28, 28, 1]`."""
    conv1, conv2, dense1, dense2 = (params[name] for name in ("conv1", "conv2", "dense1", "dense2"))
    x = images.astype(conv1["kernel"].dtype) / 255
    x = _convolution(x, conv1["kernel"], conv1["bias"])
    x = _convolution(x, conv2["kernel"], conv2["bias"])
    # Features as columns, ordered by channel, row and column, which avoids a copy on a CPU.
    x = x.transpose(3, 1, 2, 0).reshape(-1, x.shape[0])
    x = jax.nn.relu(dense1["kernel"].T @ x + dense1["bias"][:, None])
    return (dense2["kernel"].T @ x + dense2["bias"][:, None]).T


def _convolution(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Apply an unpadded convolution, relu, average pool; `[rows, height, width, channels]`."""
    convolved: jax.Array = lax.platform_dependent(
        x, kernel, bias, cpu=cpu.convolve_relu_pool, default=_ordinary_convolution
    )
    return convolved


def _ordinary_convolution(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    order = ("NHWC", "HWIO", "NHWC")
    x = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=order)
    x = jax.nn.relu(x + bias)
    window = (1, 2, 2, 1)
    total: jax.Array = lax.reduce_window(x, 0.0, lax.add, window, window, "VALID")
    return total / 4

"""LeNet without Replicax: a hand-written pmap loop, and three variants of PyTorch.

Each takes uint8 images `[rows, 28, 28, 1]` and labels `[rows]`, and returns `(seconds, loss)` of an
epoch over full batches, shuffled on the host; an incomplete last batch is dropped.
"""

import functools
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from torch_peer import Peer

BATCH = 256
DEVICES = 2
LEARNING_RATE = 0.05
MOMENTUM = 0.9
WARM_UP_BATCHES = 5

Epoch = Callable[[int], tuple[float, float]]
"""`epoch(number) -> (seconds, mean loss)`."""


def channels_first_logits(params: Any, images: jax.Array) -> jax.Array:
    """Return logits of float images `[rows, 1, 28, 28]`, with XLA's convolutions and windows."""
    x = images
    for kernel, bias in (params[0:2], params[2:4]):
        x = lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )
        x = jax.nn.relu(x + bias[:, None, None])
        x = lax.reduce_window(x, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") / 4
    x = jax.nn.relu(x.reshape(len(x), -1) @ params[4] + params[5])
    return x @ params[6] + params[7]


def channels_first_params(key: jax.Array) -> list[jax.Array]:
    """Return `[kernel, bias, ...]` of two convolutions `[out, in, kh, kw]` and the dense layers."""
    he_conv = jax.nn.initializers.he_normal(in_axis=1, out_axis=0)
    he_dense = jax.nn.initializers.he_normal()
    params = []
    for layer_key, shape in zip(
        jax.random.split(key, 4),
        [(20, 1, 3, 3), (50, 20, 5, 5), (800, 128), (128, 10)],
        strict=True,
    ):
        convolution = len(shape) == 4
        params.append((he_conv if convolution else he_dense)(layer_key, shape))
        params.append(jnp.zeros(shape[0] if convolution else shape[1]))
    return params


@functools.partial(jax.pmap, axis_name="replica", static_broadcasted_argnums=4)
def pmap_step(params: Any, momentum: Any, images: Any, labels: Any, rate: float) -> Any:
    """Take an SGD step on each device, with the gradient averaged over all."""

    def mean_loss(params: Any) -> jax.Array:
        logits = channels_first_logits(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradient = jax.value_and_grad(mean_loss)(params)
    loss, gradient = lax.pmean((loss, gradient), "replica")
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradient)
    params = jax.tree.map(lambda p, m: p - rate * m, params, momentum)
    return params, momentum, loss


def pmap_by_hand(images: np.ndarray, labels: np.ndarray) -> Epoch:
    """Return an epoch with stacked parameters and batches that are split in each step."""

    def stack(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.stack([leaf] * DEVICES), tree)

    def cut(array: jax.Array) -> jax.Array:
        return array.reshape(DEVICES, BATCH // DEVICES, *array.shape[1:])

    params = channels_first_params(jax.random.key(0))
    state = stack(params), stack(jax.tree.map(jnp.zeros_like, params))

    def epoch(number: int, batches: int = len(images) // BATCH) -> tuple[float, float]:
        nonlocal state
        started = time.perf_counter()
        order = np.random.default_rng(number).permutation(len(images))
        losses = []
        for first in range(0, batches * BATCH, BATCH):
            rows = order[first : first + BATCH]
            x = jnp.array(images[rows]).transpose(0, 3, 1, 2).astype(jnp.float32) / 255
            y = jnp.array(labels[rows])
            *state, loss = pmap_step(*state, cut(x), cut(y), LEARNING_RATE)
            # On CPU devices, a loop that never waits deadlocks at the 33rd step in flight.
            losses.append(float(loss[0]))
        jax.block_until_ready(state)
        return time.perf_counter() - started, float(np.mean(losses))

    epoch(0, WARM_UP_BATCHES)
    return epoch


def pytorch(images: np.ndarray, labels: np.ndarray, python: str, how: str) -> Epoch:
    """Return an epoch: eager or compile (one process, two threads), or ddp (two, one thread)."""
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/images.npy", images)
        np.save(f"{folder}/labels.npy", labels)
        options = [f"--batch-size={BATCH}", f"--learning-rate={LEARNING_RATE}"]
        options += [f"--momentum={MOMENTUM}"]
        peer = Peer(python, "lenet_torch.py", [*options, folder, how])

    def epoch(number: int) -> tuple[float, float]:
        started = time.perf_counter()
        loss = peer(number)
        return time.perf_counter() - started, loss

    return epoch

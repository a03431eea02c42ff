"""LeNet: the model of the NCHW convolutions, and a batch that stays split."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support.tiers import EXHAUSTIVE

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.recipes.lenet import LeNet, logits

RECIPE = LeNet()


@functools.cache
def params() -> Any:
    return RECIPE.model(jax.random.key(0))


def rows(count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "image": random.integers(0, 256, (count, 28, 28, 1)).astype(np.uint8),
        "label": random.integers(0, 10, count).astype(np.int32),
    }


def nchw_logits(params: Any, images: jax.Array) -> jax.Array:
    """The same layers as XLA's own convolutions and windows, channels first."""
    x = images.transpose(0, 3, 1, 2).astype(jnp.float32) / 255
    for name in ("conv1", "conv2"):
        kernel = params[name]["kernel"].transpose(3, 2, 0, 1)
        numbers = ("NCHW", "OIHW", "NCHW")
        x = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=numbers)
        x = jax.nn.relu(x + params[name]["bias"][:, None, None])
        x = lax.reduce_window(x, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") / 4
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ params["dense1"]["kernel"] + params["dense1"]["bias"])
    return x @ params["dense2"]["kernel"] + params["dense2"]["bias"]


def test_logits_and_gradients_are_those_of_channels_first() -> None:
    batch = rows(64)

    def mean_loss(model: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            scores = model(params, batch["image"])
            labels = jnp.asarray(batch["label"])
            return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

        return jax.jit(jax.grad(loss))(params())

    found = (jax.jit(logits)(params(), batch["image"]), mean_loss(logits))
    expected = (jax.jit(nchw_logits)(params(), batch["image"]), mean_loss(nchw_logits))
    for value, reference in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        # The order of sums, and so their rounding, depends on the processor.
        assert np.abs(value - reference).max() <= 2e-6 * np.abs(reference).max()


@EXHAUSTIVE
@pytest.mark.parametrize("devices", [2, 8])
def test_a_split_batch_stays_split(devices: int) -> None:
    """Global view: each device convolves its own rows, and only sums travel."""

    def step(count: int) -> Any:
        mesh = rx.make_mesh(devices=jax.devices()[:count])
        dp = rx.DataParallel(RECIPE.loss, optax.sgd(0.1), mesh=mesh)
        return inspect(dp.lower(params(), rows(64)).compile())

    one, many = step(1), step(devices)
    assert [each.kind for each in many.collectives] == ["all-reduce"]
    assert many.flops * devices == one.flops > 0


@EXHAUSTIVE
def test_it_computes_in_bfloat16() -> None:
    dp = rx.DataParallel(RECIPE.loss, optax.sgd(0.1), precision="bfloat16")
    _, metrics = dp.step(dp.init(params()), rows(64))
    reference = rx.DataParallel(RECIPE.loss, optax.sgd(0.1))
    _, expected = reference.step(reference.init(params()), rows(64))
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=0.01)

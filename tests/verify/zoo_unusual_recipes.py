"""Unusual losses and models for `rx.verify`: broken ones that were once passed, and correct ones
that were once refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from verify.zoo_recipes import Entry, contrastive, errors, network

# Broken.


def divided_by_devices(model: Any, batch: Any, key: Any) -> Any:
    """As it was written for `pmap`, whose sums had to be divided."""
    return errors(model, batch) / jax.device_count()


def divided_by_devices_of_process(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch) / jax.local_device_count()


def fixed_key(model: Any, batch: Any, key: Any) -> Any:
    """One mask in training and in evaluation: a row's value follows from its place."""
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
    return errors(model, {**batch, "x": batch["x"] * kept})


def fixed_seed(model: Any, batch: Any, key: Any) -> Any:
    """The same with NumPy: the mask is a constant of the program."""
    kept = np.random.default_rng(0).integers(0, 2, batch["x"].shape).astype(np.float32)
    return errors(model, {**batch, "x": batch["x"] * kept})


def fixed_seed_in_training(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch) if key is None else fixed_seed(model, batch, key)


BROKEN = {
    "fixed seed in training": Entry(fixed_seed_in_training, words="its position"),
    "device count": Entry(divided_by_devices, words="jax.device_count"),
    "device count of a process": Entry(
        divided_by_devices_of_process, words="jax.local_device_count"
    ),
    "fixed key": Entry(fixed_key, words="its position"),
    "fixed seed": Entry(fixed_seed, words="its position"),
    "fixed key, shard_map": Entry(fixed_key, words="its position", arguments={"mode": "shard_map"}),
}


# Correct.


def bfloat16_leaf() -> Any:
    weights = network()
    return {**weights, "last": weights["last"].astype(jnp.bfloat16)}


def mixup(model: Any, batch: Any, key: Any) -> Any:
    """Rows mixed with others, by an order that is traced."""
    if key is None:
        return errors(model, batch)
    order = jax.random.permutation(key, len(batch["x"]))
    x, y = (0.7 * batch[name] + 0.3 * batch[name][order] for name in ("x", "y"))
    return errors(model, {**batch, "x": x, "y": y})


def picked_by_model(model: Any, batch: Any, key: Any) -> Any:
    """An entry of each row of the batch, which the model chooses."""
    scores = jnp.tanh(batch["x"] @ model["first"] + model["bias"]) @ model["last"]
    rows = jnp.arange(len(batch["y"]))
    return batch["y"][rows, jnp.argmax(scores, axis=1)] * jnp.max(scores, axis=1)


def scalar_metric(model: Any, batch: Any, key: Any) -> Any:
    values = errors(model, batch)
    return values, {"mean": jnp.mean(values)}


def two_products(model: Any, batch: Any, key: Any) -> Any:
    outputs = batch["x"] @ model["a"] + jnp.tanh(batch["x"] @ model["c"])
    return jnp.mean((outputs - batch["y"]) ** 2, axis=-1)


def two_matrices() -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return {name: jax.random.normal(key, (6, 4)) for name, key in zip("ac", keys, strict=True)}


def sharpness_aware() -> optax.GradientTransformation:
    return optax.contrib.sam(
        optax.sgd(1e-2), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), 2
    )


def several_steps() -> Any:
    return optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()


def rare_head_model() -> Any:
    return {**network(), "rare": jnp.ones((8, 4))}


def rare_head(model: Any, batch: Any, key: Any) -> Any:
    """Rows of label 7, of which there are none in a small batch, go through a head of their own."""
    hidden = jnp.tanh(batch["x"] @ model["first"] + model["bias"])
    head = jnp.where((batch["label"] == 7)[:, None], hidden @ model["rare"], hidden @ model["last"])
    return jnp.mean((head - batch["y"]) ** 2, axis=-1)


CORRECT = {
    "bfloat16 leaf": Entry(model=bfloat16_leaf),
    "bfloat16 leaf, exact": Entry(model=bfloat16_leaf, arguments={"mode": "exact"}),
    "mixup": Entry(mixup),
    "picked by the model": Entry(picked_by_model),
    "scalar metric": Entry(scalar_metric),
    "two products": Entry(two_products, two_matrices),
    "two products, exact": Entry(two_products, two_matrices, arguments={"mode": "exact"}),
    "MultiSteps": Entry(optimizer=several_steps),
    "SAM": Entry(optimizer=sharpness_aware),
    "rare head": Entry(rare_head, rare_head_model),
    "contrastive, padded": Entry(contrastive),
}
NOTED = {"contrastive, padded": "padding"}
"""What correct ones are told all the same."""

"""Models and losses of three recipes, for the bits and the speed of mode `exact`.

Each has dropout, AdamW, a clipped gradient, and a padded last batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from replicax.recipes import transformer
from replicax.recipes.cnn import CNN
from replicax.recipes.gpt2 import GPT2
from replicax.recipes.lenet import LeNet

ROWS, MICRO_SHARDS = 1000, 32
DROPOUT = 0.1


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model, its loss and its rows."""

    model: Callable[[], Any]
    loss: Callable[..., Any]
    source: dict[str, np.ndarray]
    batch_size: int


def optimizer() -> optax.GradientTransformation:
    """Return AdamW with gradient clipping."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.01))


def subject(name: str, rows: int = ROWS) -> Subject:
    """Return `lenet`, `cnn` or `gpt2`, on its first rows."""
    recipe, loss, batch_size = {
        "lenet": (LeNet(), _lenet_loss, 96),
        "cnn": (CNN(dropout=0.25), None, 64),
        "gpt2": (_nano(), _gpt2_loss, 64),
    }[name]
    source = {key: leaf[:rows] for key, leaf in recipe.train_source().items()}
    return Subject(lambda: recipe.model(jax.random.key(0)), loss or recipe.loss, source, batch_size)


def _nano() -> GPT2:
    """Return the preset `nano` on rows of 32 tokens."""
    return GPT2(context=32)


def _lenet_loss(model: Any, batch: Any, key: jax.Array | None) -> Any:
    """Compute the recipe's loss with dropout on the pixels."""
    image = batch["image"]
    if key is not None:
        image = image * jax.random.bernoulli(key, 1 - DROPOUT, image.shape).astype(image.dtype)
    return LeNet().loss(model, {**batch, "image": image}, key)


def _gpt2_loss(model: Any, batch: Any, key: jax.Array | None) -> Any:
    """Compute the recipe's loss with dropout on the input tokens but not on the targets."""
    tokens = batch["tokens"].astype(jnp.int32)
    seen = tokens[:, :-1]
    if key is not None:
        seen = jnp.where(jax.random.bernoulli(key, 1 - DROPOUT, seen.shape), seen, 0)
    recipe = _nano()
    logits = transformer.logits(model, seen, recipe.heads, recipe.remat)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return rx.Weighted(nats, jnp.arange(seen.shape[1]) < batch["length"][:, None])

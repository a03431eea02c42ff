"""A recipe for `verify_time.py`: an NNX model of 5,018 parameters with BatchNorm and Dropout."""

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

WIDTHS = (20, 48, 64)
CLASSES = 10


class Network(nnx.Module):
    """Two blocks of a linear layer, BatchNorm and relu; Dropout; a linear layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        pairs = itertools.pairwise(WIDTHS)
        self.linears = nnx.List([nnx.Linear(*pair, rngs=rngs) for pair in pairs])
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for width in WIDTHS[1:]])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(WIDTHS[-1], CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = nnx.relu(norm(linear(x)))
        scores: jax.Array = self.last(self.dropout(x))
        return scores


@dataclasses.dataclass(frozen=True)
class Small:
    """Random rows and labels."""

    batch_size: int = 64
    epochs: int = 1

    def model(self, key: jax.Array) -> Network:
        return Network(nnx.Rngs(key))

    def loss(self, model: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        scores = model(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(scores, batch["label"])

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)

    def train_source(self) -> dict[str, np.ndarray]:
        random = np.random.default_rng(0)
        x = random.normal(size=(256, WIDTHS[0])).astype(np.float32)
        return {"x": x, "label": random.integers(0, CLASSES, 256).astype(np.int32)}

    def eval_source(self) -> None:
        return None

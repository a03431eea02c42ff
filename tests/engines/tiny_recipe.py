"""A user's own recipe file: `replicax train tiny_recipe.py:Tiny`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A line through 51 points, in batches of 16."""

    batch_size: int = 16
    epochs: int = 1

    def model(self, key: jax.Array) -> dict[str, jax.Array]:
        return {"w": jax.random.normal(key, (4,)), "b": jnp.zeros(())}

    def loss(self, model: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array):
        return (batch["x"] @ model["w"] + model["b"] - batch["y"]) ** 2

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(0.05)

    def train_source(self) -> dict[str, np.ndarray]:
        x = np.random.default_rng(0).normal(size=(51, 4)).astype(np.float32)
        return {"x": x, "y": x.sum(axis=1)}

    def eval_source(self) -> None:
        return None

    def after_training(self, model: dict[str, jax.Array]) -> str:
        return "weights " + json.dumps([*np.asarray(model["w"]).tolist(), float(model["b"])])

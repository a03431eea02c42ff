"""A line through points: the smallest whole recipe, on a plain pytree."""

import dataclasses
from typing import Any

import jax
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class LinearRegression:
    """A line fitted to noisy points, by gradient descent on the squared error."""

    batch_size: int = 64
    """Points of a global batch."""
    epochs: int = 10
    """Passes over the points."""
    learning_rate: float = 0.1
    """Learning rate of plain gradient descent."""
    points: int = 1000
    """Points to train on; a fifth as many again to evaluate on."""
    slope: float = 2.0
    """Slope of the line that the points scatter around."""
    intercept: float = -1.0
    """Intercept of the same line."""
    noise: float = 0.1
    """Standard deviation of the scatter."""

    def model(self, key: jax.Array) -> dict[str, jax.Array]:
        """A line drawn at random."""
        weight_key, bias_key = jax.random.split(key)
        return {"weight": jax.random.normal(weight_key), "bias": jax.random.normal(bias_key)}

    def loss(
        self, model: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array | None
    ) -> jax.Array:
        """Squared error, `[rows]`."""
        return (model["weight"] * batch["x"] + model["bias"] - batch["y"]) ** 2

    def optimizer(self) -> optax.GradientTransformation:
        """Plain gradient descent."""
        return optax.sgd(self.learning_rate)

    def train_source(self) -> dict[str, Any]:
        """`x` and `y`, float32 `[points]`."""
        return self._points(self.points, seed=0)

    def eval_source(self) -> dict[str, Any]:
        """The same from other draws."""
        return self._points(max(self.points // 5, 1), seed=1)

    def data_description(self) -> str:
        """Where the points come from."""
        return f"{self.points:,} points around y = {self.slope} x + {self.intercept}"

    def _points(self, count: int, seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        x = random.normal(size=count).astype(np.float32)
        noise = random.normal(scale=self.noise, size=count).astype(np.float32)
        return {"x": x, "y": np.float32(self.slope) * x + np.float32(self.intercept) + noise}

"""Linear regression: the smallest complete recipe, as a plain pytree."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from replicax.recipes.recipe import Prediction
from replicax.text.arguments import Count, Int32Count, NotNegative


@dataclasses.dataclass(frozen=True)
class LinearRegression:
    """A line fitted to noisy points by gradient descent."""

    batch_size: Int32Count = 64
    """Points per global batch."""
    epochs: Count = 10
    """Passes over the points."""
    learning_rate: float = 0.1
    """Learning rate of SGD."""
    points: Int32Count = 1000
    """Number of training points; evaluation uses a fifth as many."""
    slope: float = 2.0
    """Slope of the true line."""
    intercept: float = -1.0
    """Intercept of the true line."""
    noise: NotNegative = 0.1
    """Standard deviation of the noise."""

    def model(self, key: jax.Array) -> dict[str, jax.Array]:
        """Draw a random line."""
        weight_key, bias_key = jax.random.split(key)
        return {"weight": jax.random.normal(weight_key), "bias": jax.random.normal(bias_key)}

    def loss(
        self, model: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array | None
    ) -> jax.Array:
        """Return the squared error `[rows]`."""
        return (_line(model, batch["x"]) - batch["y"]) ** 2

    def prediction(self) -> Prediction:
        """Return the line as a function, and the shape of a point."""
        return _line, jax.ShapeDtypeStruct((), jnp.float32)

    def optimizer(self) -> optax.GradientTransformation:
        """Return SGD without momentum."""
        return optax.sgd(self.learning_rate)

    def train_source(self) -> dict[str, Any]:
        """Return `x` and `y`, float32 `[points]`."""
        return self._points(self.points, seed=0)

    def eval_source(self) -> dict[str, Any]:
        """Return `x` and `y` of a fifth as many points, from other random draws."""
        return self._points(max(self.points // 5, 1), seed=1)

    def data_description(self) -> str:
        """Describe how the points are drawn."""
        sign = "-" if self.intercept < 0 else "+"
        line = f"y = {self.slope} x {sign} {abs(self.intercept)}"
        return f"{self.points:,} points around {line}"

    def _points(self, count: int, seed: int) -> dict[str, Any]:
        random = np.random.default_rng(seed)
        x = random.normal(size=count).astype(np.float32)
        noise = random.normal(scale=self.noise, size=count).astype(np.float32)
        return {"x": x, "y": np.float32(self.slope) * x + np.float32(self.intercept) + noise}


def _line(model: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return model["weight"] * x + model["bias"]

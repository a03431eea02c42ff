"""A deep multilayer perceptron on synthetic data, in Flax Linen, dominated by matrix products."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from replicax.core.ground.precision import to_sum
from replicax.core.placement.sharding_rules import Rules
from replicax.errors import require
from replicax.recipes.recipe import Prediction
from replicax.text.arguments import Count, Int32Count

nn = require("flax.linen", "flax")

OUTPUTS = 10

# He initialization: with Linen's default, relu halves the variance, to 1e-27 after 90 layers.
he = nn.initializers.he_normal()
he_of_each = nn.initializers.he_normal(batch_axis=0)


class Stack(nn.Module):  # type: ignore[misc, name-defined]
    """A stack of `layers` Dense layers with relu: arrays `[layers, ...]` under one `lax.scan`."""

    layers: int
    hidden: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map `[rows, hidden]` to `[rows, hidden]`."""
        kernel = self.param("kernel", he_of_each, (self.layers, self.hidden, self.hidden))
        bias = self.param("bias", nn.initializers.zeros, (self.layers, self.hidden))

        def layer(x: jax.Array, params: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return nn.relu(x @ params[0] + params[1]), None

        x, _ = lax.scan(layer, x, (kernel, bias))
        return x


class Network(nn.Module):  # type: ignore[misc, name-defined]
    """A network of `layers` Dense layers with relu, all but the first stacked; a linear layer."""

    layers: int
    hidden: int

    @nn.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return predictions `[rows, 10]` for `[rows, inputs]`."""
        x = nn.relu(nn.Dense(self.hidden, kernel_init=he)(x))
        if self.layers > 1:  # a train state cannot hold empty arrays
            x = Stack(self.layers - 1, self.hidden, name="stack")(x)
        return nn.Dense(OUTPUTS)(x)  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class MLP:
    """A deep MLP (Flax Linen) fitted to a random function."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # 379 million parameters: with Adam's state, 4.5 GB.
        "seed": {
            "layers": 90,
            "hidden": 2056,
            "inputs": 1024,
            "batch_size": 6912,
            "rows": 8 * 6912,
            "epochs": 1,
            "learning_rate": 1e-4,
        },
    }

    batch_size: Int32Count = 64
    """Rows per global batch."""
    epochs: Count = 5
    """Passes over the training rows."""
    learning_rate: float = 1e-3
    """Learning rate of Adam."""
    layers: Count = 7
    """Dense layers with relu before the linear layer; all but the first have the same shape."""
    hidden: Count = 128
    """Width of each dense layer."""
    inputs: Int32Count = 16
    """Input features per row."""
    rows: Int32Count = 20_000
    """Number of training rows; evaluation uses a tenth as many."""

    def model(self, key: jax.Array) -> Any:
        """Create a network, bound to its variables."""
        network = Network(self.layers, self.hidden)
        return network.bind(network.init(key, jnp.zeros((1, self.inputs))))

    def loss(self, model: Network, batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        """Return the squared error `[rows]`, averaged over the outputs."""
        error = to_sum(model(batch["x"])) - to_sum(batch["y"])
        return jnp.mean(error**2, axis=-1)

    def prediction(self) -> Prediction:
        """Return the network as a function, and the shape of a row."""
        return Network.__call__, jax.ShapeDtypeStruct((self.inputs,), jnp.float32)

    def optimizer(self) -> optax.GradientTransformation:
        """Return Adam."""
        return optax.adam(self.learning_rate)

    def rules(self) -> Rules:
        """Split the stack's outputs over `model`, its layers over `stage`; replicate the rest."""
        return [
            (r"\['stack'\]\['kernel'\]", P("stage", None, "model")),
            (r"\['stack'\]\['bias'\]", P("stage", "model")),
            ("", P()),
        ]

    def train_source(self) -> dict[str, Any]:
        """Return `x` float32 `[rows, inputs]` and `y` float32 `[rows, 10]`."""
        return self._draw(self.rows, seed=1)

    def eval_source(self) -> dict[str, Any]:
        """Return `x` and `y` of a tenth as many rows: other draws of the same function."""
        return self._draw(max(self.rows // 10, 1), seed=2)

    def data_description(self) -> str:
        """Describe how the rows are drawn."""
        return (
            f"{self.rows:,} rows, y = tanh(x W) with random x and W, "
            f"{self.inputs} inputs, {OUTPUTS} outputs"
        )

    def _draw(self, count: int, seed: int) -> dict[str, Any]:
        function, random = np.random.default_rng(0), np.random.default_rng(seed)
        weight = function.standard_normal((self.inputs, OUTPUTS), np.float32)
        x = random.standard_normal((count, self.inputs), np.float32)
        return {"x": x, "y": np.tanh(x @ weight / np.float32(np.sqrt(self.inputs)))}

"""Models of every kind with a batch and a loss: the subjects of parity tests."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import replicax as rx
from replicax.recipes import transformer
from replicax.recipes.cnn import CNN
from replicax.recipes.gpt2 import GPT2
from replicax.recipes.lenet import LeNet
from replicax.recipes.linear_regression import LinearRegression
from replicax.recipes.mlp import MLP

ROWS = 51
BATCH = 64
CLASSES = 3


def first_key() -> jax.Array:
    """Made on first use: a process of a job joins before JAX starts."""
    return jax.random.key(0)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A model, its loss, and rows to train on; equal to itself alone."""

    model: Callable[[], Any]
    loss: Callable[..., Any] | None
    source: dict[str, np.ndarray]
    rules: tuple[tuple[str, P], ...] = ()
    """Over the axes `model` and `stage`; other parameters are whole."""
    step: Callable[..., Any] | None = None
    """A step of one's own, instead of the loss."""
    batch: int = BATCH
    epochs: int = 5


def _vectors(weights: bool = False) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    source = {
        "x": random.normal(size=(ROWS, 6)).astype(np.float32),
        "label": random.integers(0, CLASSES, ROWS),
    }
    if weights:  # from 0.03 to 30: three orders of magnitude
        source["weight"] = (10 ** random.uniform(-1.5, 1.5, ROWS)).astype(np.float32)
    return source


def _images() -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    return {
        "image": random.integers(0, 256, (ROWS, 28, 28, 1)).astype(np.uint8),
        "label": random.integers(0, 10, ROWS).astype(np.int32),
    }


def _text(context: int, vocab_size: int) -> dict[str, np.ndarray]:
    """Rows of which every fourth is short, down to one target."""
    random = np.random.default_rng(3)
    length = np.full(ROWS, context, np.int32)
    length[::4] = random.integers(1, context, len(length[::4]))
    length[0] = 1
    return {
        "tokens": random.integers(0, vocab_size, (ROWS, context + 1)).astype(np.uint16),
        "length": length,
        "bytes": random.integers(0, 4 * length).astype(np.int32),
    }


def _cross_entropy(logits: jax.Array, label: jax.Array) -> Any:
    values = optax.softmax_cross_entropy_with_integer_labels(logits, label)
    return values, {"accuracy": jnp.argmax(logits, -1) == label}


def _pytree_model() -> Any:
    first, second = jax.random.split(first_key())
    return {
        "hidden": {"kernel": jax.random.normal(first, (6, 16)) / 3, "bias": jnp.zeros(16)},
        "out": {"kernel": jax.random.normal(second, (16, CLASSES)) / 4, "bias": jnp.zeros(CLASSES)},
        "classes": np.arange(CLASSES),
    }


def _logits(model: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ model["hidden"]["kernel"] + model["hidden"]["bias"])
    return hidden @ model["out"]["kernel"] + model["out"]["bias"]


def _pytree_loss(model: Any, batch: Any, key: Any) -> Any:
    return _cross_entropy(_logits(model, batch["x"]), batch["label"])


def _weighted_loss(model: Any, batch: Any, key: Any) -> Any:
    values, metrics = _pytree_loss(model, batch, key)
    return rx.Weighted(values, batch["weight"]), metrics


def _rnn_loss(model: Any, batch: Any, key: Any) -> Any:
    """A scan that starts from zeros, over the six features as a sequence."""

    def cell(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x[:, None] * model["hidden"]["kernel"][0] + carry), None

    rows = batch["x"].shape[0]
    hidden, _ = jax.lax.scan(cell, jnp.zeros((rows, 16)), batch["x"].T)
    logits = hidden @ model["out"]["kernel"] + model["out"]["bias"]
    return _cross_entropy(logits + model["hidden"]["bias"][:CLASSES], batch["label"])


def _equinox_model() -> Any:
    return eqx.nn.MLP(6, CLASSES, 16, 1, activation=jnp.tanh, key=first_key())


def _equinox_loss(model: Any, batch: Any, key: Any) -> Any:
    return _cross_entropy(jax.vmap(model)(batch["x"]), batch["label"])


def _tower_model() -> Any:
    """Stacked layers between an input and an output layer."""
    keys = jax.random.split(jax.random.key(7), 3)
    return {
        "in": jax.random.normal(keys[0], (6, 16)) / 3,
        "layers": {
            "kernel": jax.random.normal(keys[1], (8, 16, 16)) / 6,
            "bias": jax.random.normal(keys[1], (8, 16)) / 9,
        },
        "out": jax.random.normal(keys[2], (16, CLASSES)) / 4,
    }


def _tower_loss(model: Any, batch: Any, key: Any) -> Any:
    def layer(x: jax.Array, own: Any) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ own["kernel"] + own["bias"]), None

    x, _ = jax.lax.scan(layer, batch["x"] @ model["in"], model["layers"])
    values, metrics = _cross_entropy(x @ model["out"], batch["label"])
    return rx.Weighted(values, batch["weight"]), metrics


class LinenNetwork(nn.Module):
    """Dense, BatchNorm, relu, Dense."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(16, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(CLASSES)(x)


def _linen_model() -> Any:
    network = LinenNetwork()
    return network.bind(network.init(first_key(), jnp.zeros((1, 6)), train=False))


def _linen_loss(model: Any, batch: Any, key: Any) -> Any:
    return _cross_entropy(model(batch["x"], train=key is not None), batch["label"])


class NNXNetwork(nnx.Module):
    """Linear, BatchNorm, relu, Dropout, Linear."""

    def __init__(self, dropout: float, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(6, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def _nnx_loss(model: Any, batch: Any, key: Any) -> Any:
    return _cross_entropy(model(batch["x"]), batch["label"])


def _recipe(recipe: Any, source: dict[str, np.ndarray], *rules: tuple[str, P]) -> Case:
    return Case(lambda: recipe.model(first_key()), recipe.loss, source, rules)


_SMALL_MLP = MLP(layers=3, hidden=16, inputs=6, rows=ROWS)
_SMALL_GPT2 = transformer.Shape(layers=2, heads=2, width=16, context=12, vocab_size=37)
_GPT2 = GPT2(heads=_SMALL_GPT2.heads, context=_SMALL_GPT2.context)
_SPLIT_IN, _SPLIT_OUT = P("model"), P(None, "model")
"""Kernels of which each device has rows, or columns."""
_OF_PYTREE = (("hidden.*kernel", _SPLIT_OUT), ("hidden.*bias", P("model")))

CASES = {
    "pytree": Case(_pytree_model, _pytree_loss, _vectors(), _OF_PYTREE),
    "weighted": Case(_pytree_model, _weighted_loss, _vectors(weights=True), _OF_PYTREE),
    "rnn": Case(_pytree_model, _rnn_loss, _vectors()),
    "equinox": Case(_equinox_model, _equinox_loss, _vectors()),
    "linen": Case(
        _linen_model,
        _linen_loss,
        _vectors(),
        (("Dense_0.*kernel", _SPLIT_OUT), ("Dense_1.*kernel", _SPLIT_IN)),
    ),
    "nnx": Case(
        lambda: NNXNetwork(0.0, nnx.Rngs(0)),
        _nnx_loss,
        _vectors(),
        (("hidden.*kernel", _SPLIT_OUT), ("out.*kernel", _SPLIT_IN)),
    ),
    "linear_regression": _recipe(LinearRegression(), LinearRegression(points=ROWS).train_source()),
    "mlp": _recipe(
        _SMALL_MLP,
        _SMALL_MLP.train_source(),
        ("Dense_[02].*kernel", _SPLIT_OUT),
        ("Dense_1.*kernel", _SPLIT_IN),
    ),
    "lenet": _recipe(
        LeNet(), _images(), ("dense1.*kernel", _SPLIT_OUT), ("dense2.*kernel", _SPLIT_IN)
    ),
    "cnn": _recipe(CNN(dropout=0.0), _images(), ("linear.*kernel", _SPLIT_IN)),
    "gpt2": Case(  # the recipe's model would look for a text
        lambda: transformer.init(_SMALL_GPT2, first_key()),
        _GPT2.loss,
        _text(_SMALL_GPT2.context, _SMALL_GPT2.vocab_size),
        (("wte", _SPLIT_OUT), *_GPT2.rules()[:-1]),  # tied: the input and the output
    ),
}
"""Without Dropout, whose masks differ between replicas in the per-replica modes."""

TOWER = Case(
    _tower_model,
    _tower_loss,
    CASES["weighted"].source,
    (("kernel", P("stage", None, "model")), ("layers", P("stage")), ("in", P("model"))),
)
"""Eight layers that can be cut into stages."""

DROPOUT_CASES = {
    "nnx": Case(lambda: NNXNetwork(0.5, nnx.Rngs(0)), _nnx_loss, _vectors()),
    "cnn": _recipe(CNN(dropout=0.5), _images()),
}
"""With Dropout: for modes in which every device count draws the same masks."""

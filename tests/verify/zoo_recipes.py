"""Losses and models for `rx.verify`: broken ones, each with its cause's words, and correct ones."""

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

import replicax as rx

DEVICES = 4
MICRO_BATCHES = 2
ROWS = 32
KEY = jax.random.key(0)
PyTree = Any


def data(rows: int = ROWS) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return {
        "x": random.normal(size=(rows, 6)).astype(np.float32),
        "y": random.normal(size=(rows, 4)).astype(np.float32),
        "label": random.integers(0, 3, rows).astype(np.int32),
        "weight": np.exp(random.uniform(-3, 3, rows)).astype(np.float32),
    }


def network() -> dict[str, Any]:
    keys = jax.random.split(KEY, 2)
    return {
        "first": jax.random.normal(keys[0], (6, 8)) / 2,
        "bias": jnp.zeros(8),
        "last": jax.random.normal(keys[1], (8, 4)) / 2,
    }


def outputs(model: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ model["first"] + model["bias"]) @ model["last"]


def errors(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((outputs(model, batch["x"]) - batch["y"]) ** 2, axis=-1)


def good(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A step to verify."""

    loss: Callable[..., Any] = good
    model: Callable[[], Any] = network
    optimizer: Callable[[], optax.GradientTransformation] = lambda: optax.adam(1e-2)
    words: str = ""
    """What the cause, or what was found, has to say; of broken ones."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def verify(self, modes: Any = None) -> rx.Verification:
        dp = rx.DataParallel(
            self.loss,
            self.optimizer(),
            **{"mesh": rx.make_mesh(devices=jax.devices()[:DEVICES]), **self.arguments},
        )
        return rx.verify(dp, self.model(), data(), modes=modes, micro_batches=MICRO_BATCHES)


# Broken.


def mean_of_weighted_rows(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum(errors(model, batch) * batch["weight"]) / jnp.sum(batch["weight"])


def divided_by_rows(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch) / batch["x"].shape[0]


def sum_over_rows(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum(errors(model, batch))


def constant_batch_size(model: Any, batch: Any, key: Any) -> Any:
    """Right as long as a step sees the whole batch: wrong only in micro-batches, or replicas."""
    return errors(model, batch) * (batch["x"].shape[0] / ROWS)


def contrastive(model: Any, batch: Any, key: Any) -> Any:
    left, right = outputs(model, batch["x"]), batch["y"]
    return optax.softmax_cross_entropy_with_integer_labels(left @ right.T, jnp.arange(len(left)))


def contrastive_gathered(model: Any, batch: Any, key: Any) -> Any:
    left = outputs(model, batch["x"])
    right, real = rx.gather((batch["y"], rx.row_weights(left)))
    among_all = jax.nn.logsumexp(left @ right.T, axis=1, b=real)
    return among_all - jnp.sum(left * batch["y"], axis=1)


def contrastive_mean(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(contrastive(model, batch, key))


def constant_key(model: Any, batch: Any, key: Any) -> Any:
    x = batch["x"]
    if key is not None:
        x = x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return errors(model, {**batch, "x": x})


def dead_parameter() -> Any:
    return {**network(), "unused": jnp.ones(3)}


def host_random(model: Any, batch: Any, key: Any) -> Any:
    random = np.random.default_rng()

    def draw(shape: Any) -> np.ndarray:
        return random.normal(size=4).astype(np.float32)

    noise = jax.pure_callback(draw, jax.ShapeDtypeStruct((4,), jnp.float32), batch["x"][0, 0])
    return errors(model, {**batch, "y": batch["y"] + jax.lax.stop_gradient(noise)})


def traced_random(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch) * np.float32(1 + np.random.rand())


def reduced_by_hand(model: Any, batch: Any, key: Any) -> Any:
    return jax.lax.psum(errors(model, batch), "data")


class RunningMean(nn.Module):
    """Statistics of its own making, which nobody synchronises."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        mean = self.variable("statistics", "mean", jnp.zeros, 6)
        if train:
            mean.value = 0.9 * mean.value + 0.1 * jnp.mean(x, axis=0)
        return nn.Dense(4)(x - mean.value)


def running_mean_model() -> Any:
    module = RunningMean()
    return module.bind(module.init(KEY, jnp.zeros((1, 6)), train=False))


def linen_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((model(batch["x"], train=key is not None) - batch["y"]) ** 2, axis=-1)


def factor_by_rows_seen(model: Any, batch: Any, key: Any) -> Any:
    """In training only, so that leaving rows out in evaluation does not show it."""
    values = errors(model, batch)
    return values if key is None else values * (ROWS / batch["x"].shape[0])


def clipped_by_hand(model: Any, batch: Any, key: Any) -> Any:
    """Values are scaled by the largest that a replica sees."""
    values = errors(model, batch)
    return values / jax.lax.stop_gradient(jnp.max(values))


BROKEN = {
    "mean of means": Entry(mean_of_weighted_rows, words="mean of means"),
    "mean of means, shard_map": Entry(
        mean_of_weighted_rows, words="rx.Weighted", arguments={"mode": "shard_map"}
    ),
    "divides by its rows": Entry(divided_by_rows, words="divides by"),
    "sum": Entry(sum_over_rows, words="a sum over"),
    "constant batch size": Entry(constant_batch_size, words="multiplies by"),
    "factor in training": Entry(factor_by_rows_seen, words="exactly 4 times"),
    "contrastive, shard_map": Entry(
        contrastive, words="one another", arguments={"mode": "shard_map"}
    ),
    "contrastive, micro-batches": Entry(
        contrastive, words="one another", arguments={"accumulate": 2}
    ),
    "contrastive scalar, shard_map": Entry(
        contrastive_mean, words="one another", arguments={"mode": "shard_map"}
    ),
    "scaled by the largest, shard_map": Entry(
        clipped_by_hand, words="one another", arguments={"mode": "shard_map"}
    ),
    "constant key": Entry(constant_key, words="constant key,"),
    "dead parameter": Entry(model=dead_parameter, words="['unused']"),
    "host random": Entry(host_random, words="pure_callback"),
    "traced random": Entry(traced_random, words="np.random"),
    "reduced by hand": Entry(
        reduced_by_hand, words="reduces over the replicas itself", arguments={"mode": "shard_map"}
    ),
    "own statistics, shard_map": Entry(
        linen_loss,
        running_mean_model,
        words="BatchNorm statistics",
        arguments={"mode": "shard_map"},
    ),
}


# Correct.


class LinenNorm(nn.Module):
    """Dense, BatchNorm, relu, Dense."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(8, use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(4)(x)


def linen_norm_model() -> Any:
    module = LinenNorm()
    return module.bind(module.init(KEY, jnp.zeros((1, 6)), train=False))


class NNXNetwork(nnx.Module):
    """Linear, BatchNorm, relu, Dropout, Linear."""

    def __init__(self, dropout: float) -> None:
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(6, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.out = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


def nnx_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)


def dropout(model: Any, batch: Any, key: Any) -> Any:
    x = batch["x"]
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.5, x.shape) * 2
    return errors(model, {**batch, "x": x})


def mixture(model: Any, batch: Any, key: Any) -> Any:
    values = errors(model, batch)
    metrics = {"count": rx.Weighted(batch["label"].astype(jnp.float32), batch["weight"])}
    return rx.Weighted(values, batch["weight"]), metrics


def recurrent(model: Any, batch: Any, key: Any) -> Any:
    def cell(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x[:, None] * model["first"][0] + carry + model["bias"]), None

    start = jnp.zeros((batch["x"].shape[0], 8))
    hidden, _ = jax.lax.scan(cell, start, batch["x"].T)
    return jnp.mean((hidden @ model["last"] - batch["y"]) ** 2, axis=-1)


def tied_model() -> Any:
    return {"embedding": jax.random.normal(KEY, (5, 8)), "mix": jnp.eye(8)}


def tied(model: Any, batch: Any, key: Any) -> Any:
    hidden = jnp.tanh(model["embedding"][batch["label"]] @ model["mix"])
    logits = hidden @ model["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, (batch["label"] + 1) % 5)


def frozen(model: Any, batch: Any, key: Any) -> Any:
    return errors({**model, "first": jax.lax.stop_gradient(model["first"])}, batch)


def frozen_optimizer() -> optax.GradientTransformation:
    def labels(params: Any) -> Any:
        return {name: "frozen" if name == "first" else "trained" for name in params}

    return optax.multi_transform(
        {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}, labels
    )


def gated_model() -> Any:
    return {**network(), "gate": jnp.zeros(()), "behind": jnp.ones((6, 4))}


def gated(model: Any, batch: Any, key: Any) -> Any:
    """A branch behind a gate of 0: no gradient at first, and no dead parameter."""
    branch = model["gate"] * (batch["x"] @ model["behind"])
    return jnp.mean((outputs(model, batch["x"]) + branch - batch["y"]) ** 2, axis=-1)


def equal_mean(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(errors(model, batch))


def equinox_model() -> Any:
    return eqx.nn.MLP(6, 4, 8, 1, activation=jnp.tanh, key=KEY)


def equinox_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def clipped_adamw() -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 100)
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(rate))


CORRECT = {
    "plain": Entry(),
    "contrastive": Entry(contrastive),
    "contrastive scalar": Entry(contrastive_mean),
    "contrastive gathered, shard_map": Entry(contrastive_gathered, arguments={"mode": "shard_map"}),
    "linen BatchNorm": Entry(linen_loss, linen_norm_model),
    "nnx BatchNorm": Entry(nnx_loss, lambda: NNXNetwork(0.0)),
    "nnx BatchNorm, shard_map": Entry(
        nnx_loss, lambda: NNXNetwork(0.0), arguments={"mode": "shard_map"}
    ),
    "nnx Dropout": Entry(nnx_loss, lambda: NNXNetwork(0.5)),
    "nnx Dropout, exact": Entry(nnx_loss, lambda: NNXNetwork(0.5), arguments={"mode": "exact"}),
    "own statistics": Entry(linen_loss, running_mean_model),
    "mixture of weights": Entry(mixture, optimizer=clipped_adamw),
    "recurrent": Entry(recurrent),
    "tied embeddings": Entry(tied, tied_model),
    "frozen by stop_gradient": Entry(frozen),
    "frozen by optax": Entry(optimizer=frozen_optimizer),
    "gate of 0": Entry(gated, gated_model),
    "dropout, shard_map": Entry(dropout, arguments={"mode": "shard_map"}),
    "equinox": Entry(equinox_loss, equinox_model),
    "mean of equal rows": Entry(equal_mean),
    "bfloat16": Entry(arguments={"precision": "bfloat16"}),
    "fsdp": Entry(arguments={"layout": "fsdp"}),
    "zero1": Entry(arguments={"layout": "zero1"}),
}
NOTED = {
    "frozen by stop_gradient": "frozen by stop_gradient",
    "frozen by optax": "do not change",
    "contrastive": "one another",
    "contrastive gathered, shard_map": "gathers them from all replicas",
    "own statistics": "BatchNorm statistics",
}
"""What correct ones are told all the same."""

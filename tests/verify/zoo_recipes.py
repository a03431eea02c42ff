"""Losses and models for `rx.verify`: broken ones with words of their causes, and correct ones."""

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


def hidden(model: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ model["first"] + model["bias"])


def outputs(model: Any, x: jax.Array) -> jax.Array:
    return hidden(model, x) @ model["last"]


def squares(values: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((values - batch["y"]) ** 2, axis=-1)


def errors(model: Any, batch: Any) -> jax.Array:
    return squares(outputs(model, batch["x"]), batch)


def good(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch)


def in_training(loss: Any) -> Any:
    """Use `loss` with a key, and the plain errors without one."""
    return lambda model, batch, key: (good if key is None else loss)(model, batch, key)


def mean_of(loss: Any) -> Any:
    return lambda *given: jnp.mean(loss(*given))


def bound(module: nn.Module) -> Any:
    return module.bind(module.init(KEY, jnp.zeros((1, 6)), train=False))


@dataclasses.dataclass(frozen=True)
class Entry:
    """A step to verify."""

    loss: Callable[..., Any] = good
    model: Callable[[], Any] = network
    optimizer: Callable[[], optax.GradientTransformation] = lambda: optax.adam(1e-2)
    words: str = ""
    """Words that the cause or the finding must contain, for broken steps."""
    noted: tuple[str, ...] = ()
    """Notes about correct steps."""
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def verify(self, modes: Any = None) -> rx.types.Verification:
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


def contrastive(model: Any, batch: Any, key: Any) -> Any:
    left, right = outputs(model, batch["x"]), batch["y"]
    return optax.softmax_cross_entropy_with_integer_labels(left @ right.T, jnp.arange(len(left)))


def contrastive_gathered(model: Any, batch: Any, key: Any) -> Any:
    left = outputs(model, batch["x"])
    right, real = rx.gather((batch["y"], rx.row_weights(left)))
    among_all = jax.nn.logsumexp(left @ right.T, axis=1, b=real)
    return among_all - jnp.sum(left * batch["y"], axis=1)


contrastive_mean = mean_of(contrastive)


def fixed_key(model: Any, batch: Any, key: Any) -> Any:
    """One mask in training and in evaluation: the value of a row depends on its index."""
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
    return errors(model, {**batch, "x": batch["x"] * kept})


constant_key = in_training(fixed_key)


def fixed_seed(model: Any, batch: Any, key: Any) -> Any:
    """The same with NumPy: the mask is a constant of the program."""
    kept = np.random.default_rng(0).integers(0, 2, batch["x"].shape).astype(np.float32)
    return errors(model, {**batch, "x": batch["x"] * kept})


def host_random(model: Any, batch: Any, key: Any) -> Any:
    random, shape = np.random.default_rng(), jax.ShapeDtypeStruct((4,), jnp.float32)
    draw = lambda _: random.normal(size=4).astype(np.float32)  # noqa: E731
    noise = jax.pure_callback(draw, shape, batch["x"][0, 0])
    return errors(model, {**batch, "y": batch["y"] + jax.lax.stop_gradient(noise)})


def traced_random(model: Any, batch: Any, key: Any) -> Any:
    return errors(model, batch) * np.float32(1 + np.random.rand())


class RunningMean(nn.Module):
    """Hand-written statistics without synchronisation."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        mean = self.variable("statistics", "mean", jnp.zeros, 6)
        if train:
            mean.value = 0.9 * mean.value + 0.1 * jnp.mean(x, axis=0)
        return nn.Dense(4)(x - mean.value)


def linen_loss(model: Any, batch: Any, key: Any) -> Any:
    return squares(model(batch["x"], train=key is not None), batch)


@in_training
def factor_by_rows_seen(model: Any, batch: Any, key: Any) -> Any:
    """Mixes rows only in training, so that evaluation without some rows does not show it."""
    return errors(model, batch) * (ROWS / batch["x"].shape[0])


def clipped_by_hand(model: Any, batch: Any, key: Any) -> Any:
    """Values are scaled by the largest that a replica sees."""
    values = errors(model, batch)
    return values / jax.lax.stop_gradient(jnp.max(values))


SHARDED: dict[str, Any] = {"arguments": {"mode": "shard_map"}}
EXACT: dict[str, Any] = {"arguments": {"mode": "exact"}}
BROKEN = {
    "mean of means": Entry(mean_of_weighted_rows, words="mean of means"),
    "mean of means, shard_map": Entry(mean_of_weighted_rows, words="rx.Weighted", **SHARDED),
    "divides by its rows": Entry(divided_by_rows, words="divides by"),
    "sum": Entry(sum_over_rows, words="a sum over"),
    # Right if a step sees the whole batch; wrong in micro-batches or replicas.
    "constant batch size": Entry(
        lambda model, batch, key: errors(model, batch) * (batch["x"].shape[0] / ROWS),
        words="multiplies by",
    ),
    "factor in training": Entry(factor_by_rows_seen, words="4 times"),
    "contrastive, shard_map": Entry(contrastive, words="one another", **SHARDED),
    "contrastive, micro-batches": Entry(
        contrastive, words="one another", arguments={"accumulate": 2}
    ),
    "contrastive scalar, shard_map": Entry(contrastive_mean, words="one another", **SHARDED),
    "scaled by the largest, shard_map": Entry(clipped_by_hand, words="one another", **SHARDED),
    "constant key": Entry(constant_key, words="constant key,"),
    "fixed key": Entry(fixed_key, words="its position"),
    "fixed key, shard_map": Entry(fixed_key, words="its position", **SHARDED),
    "fixed seed": Entry(fixed_seed, words="its position"),
    "fixed seed in training": Entry(in_training(fixed_seed), words="its position"),
    "dead parameter": Entry(model=lambda: {**network(), "unused": jnp.ones(3)}, words="['unused']"),
    "host random": Entry(host_random, words="pure_callback"),
    "traced random": Entry(traced_random, words="np.random"),
    "reduced by hand": Entry(
        lambda *given: jax.lax.psum(good(*given), "data"),
        words="reduces over the replicas itself",
        **SHARDED,
    ),
    "own statistics, shard_map": Entry(
        linen_loss, lambda: bound(RunningMean()), words="one another", **SHARDED
    ),
    # As it was written for `pmap`, whose sums had to be divided.
    "device count": Entry(
        lambda *given: good(*given) / jax.device_count(), words="jax.device_count"
    ),
    "device count of a process": Entry(
        lambda *given: good(*given) / jax.local_device_count(), words="jax.local_device_count"
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
    return squares(model(batch["x"]), batch)


@in_training
def dropout(model: Any, batch: Any, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return errors(model, {**batch, "x": batch["x"] * kept * 2})


def mixture(model: Any, batch: Any, key: Any) -> Any:
    metrics = {"count": rx.Weighted(batch["label"].astype(jnp.float32), batch["weight"])}
    return rx.Weighted(errors(model, batch), batch["weight"]), metrics


def recurrent(model: Any, batch: Any, key: Any) -> Any:
    def cell(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x[:, None] * model["first"][0] + carry + model["bias"]), None

    last, _ = jax.lax.scan(cell, jnp.zeros((len(batch["x"]), 8)), batch["x"].T)
    return squares(last @ model["last"], batch)


def tied_model() -> Any:
    return {"embedding": jax.random.normal(KEY, (5, 8)), "mix": jnp.eye(8)}


def tied(model: Any, batch: Any, key: Any) -> Any:
    hidden = jnp.tanh(model["embedding"][batch["label"]] @ model["mix"])
    logits = hidden @ model["embedding"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, (batch["label"] + 1) % 5)


def frozen(model: Any, batch: Any, key: Any) -> Any:
    return errors({**model, "first": jax.lax.stop_gradient(model["first"])}, batch)


def frozen_optimizer() -> optax.GradientTransformation:
    parts = {"frozen": optax.set_to_zero(), "trained": optax.adam(1e-2)}
    return optax.multi_transform(parts, {"first": "frozen", "bias": "trained", "last": "trained"})


def gated(model: Any, batch: Any, key: Any) -> Any:
    """A branch behind a gate of 0: no gradient at first, but no dead parameter."""
    branch = model["gate"] * (batch["x"] @ model["behind"])
    return squares(outputs(model, batch["x"]) + branch, batch)


equal_mean = mean_of(good)


def equinox_loss(model: Any, batch: Any, key: Any) -> Any:
    return squares(jax.vmap(model)(batch["x"]), batch)


def clipped_adamw() -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 100)
    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(rate))


def bfloat16_leaf() -> Any:
    weights = network()
    return {**weights, "last": weights["last"].astype(jnp.bfloat16)}


@in_training
def mixup(model: Any, batch: Any, key: Any) -> Any:
    """Rows mixed with others, by an order that is traced."""
    order = jax.random.permutation(key, len(batch["x"]))
    x, y = (0.7 * batch[name] + 0.3 * batch[name][order] for name in ("x", "y"))
    return errors(model, {**batch, "x": x, "y": y})


def picked_by_model(model: Any, batch: Any, key: Any) -> Any:
    """An entry of each row of the batch, which the model chooses."""
    scores = outputs(model, batch["x"])
    rows = jnp.arange(len(batch["y"]))
    return batch["y"][rows, jnp.argmax(scores, axis=1)] * jnp.max(scores, axis=1)


def scalar_metric(model: Any, batch: Any, key: Any) -> Any:
    values = errors(model, batch)
    return values, {"mean": jnp.mean(values)}


def two_products(model: Any, batch: Any, key: Any) -> Any:
    return squares(batch["x"] @ model["a"] + jnp.tanh(batch["x"] @ model["c"]), batch)


def two_matrices() -> Any:
    keys = zip("ac", jax.random.split(KEY, 2), strict=True)
    return {name: jax.random.normal(key, (6, 4)) for name, key in keys}


def sharpness_aware() -> optax.GradientTransformation:
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.sgd(1e-2), ascent, 2)


def rare_head(model: Any, batch: Any, key: Any) -> Any:
    """Rows of label 7, which a small batch lacks, have their own head."""
    inner = hidden(model, batch["x"])
    head = jnp.where((batch["label"] == 7)[:, None], inner @ model["rare"], inner @ model["last"])
    return squares(head, batch)


CORRECT = {
    "plain": Entry(),
    "contrastive": Entry(contrastive, noted=("one another", "padding")),
    "contrastive scalar": Entry(contrastive_mean),
    "contrastive gathered, shard_map": Entry(
        contrastive_gathered, noted=("gathers them from all replicas",), **SHARDED
    ),
    "linen BatchNorm": Entry(linen_loss, lambda: bound(LinenNorm())),
    "nnx BatchNorm": Entry(nnx_loss, lambda: NNXNetwork(0.0)),
    "nnx BatchNorm, shard_map": Entry(nnx_loss, lambda: NNXNetwork(0.0), **SHARDED),
    "nnx Dropout": Entry(nnx_loss, lambda: NNXNetwork(0.5)),
    "nnx Dropout, exact": Entry(nnx_loss, lambda: NNXNetwork(0.5), **EXACT),
    "own statistics": Entry(linen_loss, lambda: bound(RunningMean()), noted=("one another",)),
    "mixture of weights": Entry(mixture, optimizer=clipped_adamw),
    "recurrent": Entry(recurrent),
    "tied embeddings": Entry(tied, tied_model),
    "frozen by stop_gradient": Entry(frozen, noted=("frozen by stop_gradient",)),
    "frozen by optax": Entry(optimizer=frozen_optimizer, noted=("do not change",)),
    "gate of 0": Entry(
        gated, lambda: {**network(), "gate": jnp.zeros(()), "behind": jnp.ones((6, 4))}
    ),
    "dropout, shard_map": Entry(dropout, **SHARDED),
    "equinox": Entry(equinox_loss, lambda: eqx.nn.MLP(6, 4, 8, 1, activation=jnp.tanh, key=KEY)),
    "mean of equal rows": Entry(equal_mean),
    "bfloat16": Entry(arguments={"precision": "bfloat16"}),
    "fsdp": Entry(arguments={"layout": "fsdp"}),
    "zero1": Entry(arguments={"layout": "zero1"}),
    "bfloat16 leaf": Entry(model=bfloat16_leaf),
    "bfloat16 leaf, exact": Entry(model=bfloat16_leaf, **EXACT),
    "mixup": Entry(mixup),
    "picked by the model": Entry(picked_by_model),
    "scalar metric": Entry(scalar_metric),
    "two products": Entry(two_products, two_matrices),
    "two products, exact": Entry(two_products, two_matrices, **EXACT),
    "MultiSteps": Entry(
        optimizer=lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()
    ),
    "SAM": Entry(optimizer=sharpness_aware),
    "rare head": Entry(rare_head, lambda: {**network(), "rare": jnp.ones((8, 4))}),
}

"""Metrics that are no means, of a small model: as objects, and by the book on all rows at once."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax as rx

ROWS = 83
MODEL = {"w": np.float32([0.5, 0.0, -1.0, 0.3])}


def rows(count: int = ROWS) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS, 4)).astype(np.float32)
    label = x @ np.float32([1, 0, -1, 1]) + random.normal(size=ROWS) > 0
    return {"x": x[:count], "label": label[:count]}


@flax.struct.dataclass
class F1:
    """F1, of counts."""

    right: jax.Array
    wrong: jax.Array

    @classmethod
    def of(cls, score: Any, label: Any, weights: Any) -> "F1":
        right, wrong = (score > 0) & label, (score > 0) ^ label
        return cls(jnp.sum(weights * right), jnp.sum(weights * wrong))

    def merge(self, other: "F1") -> "F1":
        return F1(self.right + other.right, self.wrong + other.wrong)

    def compute(self) -> Any:
        return 2 * self.right / (2 * self.right + self.wrong)


def auc(score: np.ndarray, label: np.ndarray) -> float:
    """The share of pairs in the right order."""
    gap = score[label][:, None] - score[~label]
    return float(np.mean((gap > 0) + (gap == 0) / 2))


def loss(model: Any, batch: Any, key: Any) -> Any:
    score, label = batch["x"] @ model["w"], batch["label"]
    nats, real = optax.sigmoid_binary_cross_entropy(score, label), rx.row_weights(score)
    both = nnx.MultiMetric(right=nnx.metrics.Accuracy(0.0), nats=nnx.metrics.Average("nats"))
    both.update(logits=score, labels=jnp.int32(label), nats=nats, mask=real)
    return nats, {
        "f1": F1.of(score, label, real),
        "auc": rx.HostMetric(auc, score, label),
        "both": both,
        "size": jnp.abs(score),
    }


def by_the_book(count: int = ROWS) -> dict[str, float]:
    """The same of all rows at once."""
    x, label = rows(count).values()
    score = x @ MODEL["w"]
    right, wrong = np.sum((score > 0) & label), np.sum((score > 0) ^ label)
    nats = float(np.mean(np.logaddexp(0, np.where(label, -score, score))))
    return {
        "auc": auc(score, label),
        "f1": 2 * right / (2 * right + wrong),
        "both/right": float(np.mean((score > 0) == label)),
        "both/nats": nats,
        "loss": nats,
        "size": float(np.mean(np.abs(score))),
    }


def values(metrics: dict[str, Any]) -> dict[str, float]:
    """Return what a step's metrics compute."""
    found: dict[str, float] = {}
    for name, value in metrics.items():
        each = value.compute() if isinstance(value, rx.types.Merged) else float(value)
        found |= (
            {f"{name}/{key}": one for key, one in each.items()}
            if isinstance(each, dict)
            else {name: each}
        )
    return found

"""Metrics that are no means: AUC, F1 and perplexity of all rows, on any number of devices.

F1 and perplexity are objects with `merge` and `compute`, as those of clu, metrax and `nnx.metrics`
are. AUC needs all scores at once: `rx.HostMetric` calls any function of NumPy arrays with them, as
`sklearn.metrics.roc_auc_score`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

import replicax as rx

ROWS, INPUTS = 84, 16


@struct.dataclass
class F1:
    """The harmonic mean of precision and recall, of counts."""

    right: jax.Array
    wrong: jax.Array

    @classmethod
    def of(cls, predicted, label, weights):
        right = weights @ jnp.float32(predicted & label)
        return cls(right, weights @ jnp.float32(predicted ^ label))

    def merge(self, other):
        return F1(self.right + other.right, self.wrong + other.wrong)

    def compute(self):
        return 2 * self.right / (2 * self.right + self.wrong)


@struct.dataclass
class Perplexity:
    """The exponential of the mean of nats."""

    nats: jax.Array
    count: jax.Array

    def merge(self, other):
        return Perplexity(self.nats + other.nats, self.count + other.count)

    def compute(self):
        return jnp.exp(self.nats / self.count)


def auc(score, label):
    """The share of pairs in which the row with label 1 has the higher score."""
    gap = score[label == 1][:, None] - score[label == 0]
    return np.mean((gap > 0) + (gap == 0) / 2)


def at_once(score, label):
    """The same three of all rows on one device, by the book."""
    right, wrong = np.sum((score > 0) & label), np.sum((score > 0) ^ label)
    nats = np.mean(np.logaddexp(0, np.where(label, -score, score)))
    return {
        "auc": auc(score, label),
        "f1": 2 * right / (2 * right + wrong),
        "perplexity": np.exp(nats),
    }


def rows():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, INPUTS)).astype(np.float32)
    noise = random.normal(scale=2, size=ROWS)
    return {"x": x, "label": x @ random.normal(size=INPUTS) + noise > 1}


def model():
    return {"w": jnp.zeros(INPUTS), "b": jnp.zeros(())}


def logits(model, batch):
    return batch["x"] @ model["w"] + model["b"]


def loss(model, batch, key):
    score, label = logits(model, batch), batch["label"]
    nats = optax.sigmoid_binary_cross_entropy(score, label)
    real = rx.row_weights(score)  # 0 for padding, which counts nowhere
    return nats, {
        "auc": rx.HostMetric(auc, score, label),
        "f1": F1.of(score > 0, label, real),
        "perplexity": Perplexity(real @ nats, jnp.sum(real)),
    }


def optimizer():
    return optax.adam(3e-2)


def main():
    dp = rx.DataParallel(loss, optimizer())
    state = dp.init(model())
    for epoch in range(10):
        for batch in dp.feed(rows(), 32, shuffle=True, epoch=epoch):
            state, metrics = dp.step(state, batch)
    print(f"last batch: f1 {float(metrics['f1']):.3f}")
    found = dp.evaluate(state, dp.feed(rows(), 32))  # batches of 32, 32 and 20 rows
    score = np.asarray(logits(dp.model(state), rows()))
    for name, value in at_once(score, rows()["label"]).items():
        print(f"{name} {found[name]:.6f}, of all rows at once {value:.6f}")


if __name__ == "__main__":
    main()

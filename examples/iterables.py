"""Batches from other libraries: a tf.data-like stream and a Hugging Face-like table.

`Table` imitates both, so that neither is imported; `Passes` and `collate` are all they need.
"""

import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, LENGTH, TOKENS = 84, 32, 12, 20


class Table:
    """Lists by row or slice, as `datasets.Dataset`; a stream of arrays, as `tf.data.Dataset`."""

    def __init__(self):
        random = np.random.default_rng(0)
        sizes = random.integers(3, LENGTH, size=ROWS)
        self.tokens = [random.integers(1, TOKENS, size=size).tolist() for size in sizes]
        self.label = [int(np.mean(text) > TOKENS / 2) for text in self.tokens]

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"tokens": self.tokens[index], "label": self.label[index]}

    def iter(self, batch_size):
        return (self[at : at + batch_size] for at in range(0, ROWS, batch_size))

    def as_numpy_iterator(self):
        return map(collate, self.iter(BATCH))


class Passes:
    """A re-iterable of batches: `begin` returns a new iterator for each epoch."""

    def __init__(self, begin):
        self.begin = begin

    def __iter__(self):
        return self.begin()


def collate(batch):
    """Convert lists to arrays; all texts are padded to one length to avoid recompilation."""
    tokens = [text + [0] * (LENGTH - len(text)) for text in batch["tokens"]]
    return {"tokens": np.int32(tokens), "label": np.float32(batch["label"])}


def rows():
    return collate(Table()[:])


def sources():
    return {
        "stream": Passes(Table().as_numpy_iterator),
        "table in batches": Passes(lambda: map(collate, Table().iter(BATCH))),
        "table in memory": rows(),  # the only one that Replicax can shuffle
    }


def model():
    return {"score": jnp.linspace(-1, 1, TOKENS), "bias": jnp.float32(1)}


def loss(model, batch, key):
    scores = jnp.where(batch["tokens"] > 0, model["score"][batch["tokens"]], 0)
    logits = jnp.sum(scores, axis=1) + model["bias"]
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"])


def optimizer():
    return optax.adam(1e-2)


def main():
    dp = rx.DataParallel(loss, optimizer())
    for name, source in sources().items():
        result = rx.fit(dp, dp.init(model()), source, batch_size=BATCH, epochs=30, progress=False)
        print(f"{name}: loss {result.metrics['loss']:.3f} nats")


if __name__ == "__main__":
    main()

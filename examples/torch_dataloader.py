"""Rows from a PyTorch `DataLoader`: pass its dicts of tensors to `dp.feed` unchanged.

The order of an epoch is seeded by its number, so that every epoch can be reproduced.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.utils.data import DataLoader, Dataset

import replicax as rx

ROWS, BATCH, INPUTS, CLASSES = 84, 32, 16, 4


class Flowers(Dataset):
    """Measurements of flowers and their kinds."""

    def __init__(self):
        random = np.random.default_rng(0)
        self.x = torch.from_numpy(random.normal(size=(ROWS, INPUTS)).astype(np.float32))
        weights = torch.from_numpy(random.normal(size=(INPUTS, CLASSES)).astype(np.float32))
        self.label = torch.argmax(self.x @ weights, dim=1)

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return {"x": self.x[row], "label": self.label[row]}


def loader(epoch=None):
    """Batches in the order of `epoch`, or of the dataset; the last may be smaller."""
    # With `num_workers`, use `multiprocessing_context="forkserver"`: forking with threads may hang.
    order = None if epoch is None else torch.Generator().manual_seed(epoch)
    return DataLoader(Flowers(), BATCH, shuffle=order is not None, generator=order)


def sources():
    return {"a DataLoader": loader()}


def rows():
    flowers = Flowers()
    return {"x": flowers.x.numpy(), "label": flowers.label.numpy().astype(np.int32)}


def model():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "in": jax.random.normal(keys[0], (INPUTS, 64)) / INPUTS**0.5,
        "out": jax.random.normal(keys[1], (64, CLASSES)) / 8,
    }


def loss(model, batch, key):
    logits = jax.nn.relu(batch["x"] @ model["in"]) @ model["out"]
    right = jnp.argmax(logits, axis=1) == batch["label"]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return nats, {"accuracy": right}


def optimizer():
    return optax.adam(3e-3)


def main():
    dp = rx.DataParallel(loss, optimizer())
    state = dp.init(model())
    for epoch in range(30):
        for batch in dp.feed(loader(epoch), BATCH):
            state, _ = dp.step(state, batch)
    print(f"accuracy {dp.evaluate(state, loader(), batch_size=BATCH)['accuracy']:.3f}")


if __name__ == "__main__":
    main()

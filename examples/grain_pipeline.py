"""A Grain `MapDataset`, with its own `shuffle` and `map`, handed over as rows and not as batches.

`dp.feed` cuts it and draws an order for each epoch; a run that resumes begins at the very row.
"""

import grain
import jax
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, SIDE, CLASSES = 84, 32, 8, 4


class Records:
    """Images of a bright quarter: whatever has a length and can be indexed is a source of Grain.

    A dataset of Hugging Face's or of torch's is one too.
    """

    def __init__(self):
        random = np.random.default_rng(0)
        self.label = random.integers(CLASSES, size=ROWS)
        self.image = random.integers(160, size=(ROWS, SIDE, SIDE), dtype=np.uint8)
        for image, label in zip(self.image, self.label):
            image.reshape(2, SIDE // 2, 2, SIDE // 2)[label // 2, :, label % 2] += 60

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return {"image": self.image[row], "label": self.label[row]}


def prepare(record):
    """An image of zero mean; Grain calls this ahead of time, in threads."""
    image = record["image"].astype(np.float32) / 255
    return {"image": image - image.mean(), "label": np.int32(record["label"])}


def pipeline():
    return grain.MapDataset.source(Records()).shuffle(seed=0).map(prepare)


def sources():
    return {"a MapDataset": pipeline()}


def rows():
    """All that the pipeline gives, as arrays."""
    return jax.tree.map(lambda *rows: np.stack(rows), *pipeline())


def model():
    return {"out": jax.random.normal(jax.random.key(0), (SIDE**2, CLASSES)) / SIDE}


def loss(model, batch, key):
    logits = batch["image"].reshape(-1, SIDE**2) @ model["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def optimizer():
    return optax.adam(1e-2)


def main():
    dp = rx.DataParallel(loss, optimizer())
    state = dp.init(model())
    for epoch in range(30):
        for batch in dp.feed(pipeline(), BATCH, shuffle=True, epoch=epoch):
            state, metrics = dp.step(state, batch)
    print(f"loss {metrics['loss']:.3f} nats, {np.log(CLASSES):.3f} by chance")


if __name__ == "__main__":
    main()

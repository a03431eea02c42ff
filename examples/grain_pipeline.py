"""A Grain `MapDataset`, with its own `shuffle` and `map`, passed as rows instead of batches.

`dp.feed` batches and reshuffles it every epoch; a run resumes at exactly the next row.
"""

import grain
import jax
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, SIDE, CLASSES = 84, 32, 8, 4


class Records:
    """Images with one bright quarter, as a Grain source: any object with a length and indexing.

    Hugging Face and PyTorch datasets qualify too.
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
    """Normalize the image to zero mean; Grain prefetches this in threads."""
    image = record["image"].astype(np.float32) / 255
    return {"image": image - image.mean(), "label": np.int32(record["label"])}


def pipeline():
    return grain.MapDataset.source(Records()).shuffle(seed=0).map(prepare)


def sources():
    return {"a MapDataset": pipeline()}


def rows():
    """All rows of the pipeline, as arrays."""
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

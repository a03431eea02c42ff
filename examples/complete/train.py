"""A training script as people write it: PyTorch's loader, a Flax NNX model, AUC, Weights & Biases.

`python train.py runs/fraud` trains on every device. Kill it and start it again: it goes on from its
last checkpoint, inside the epoch, without reading what it has trained on. `opened.py` reads what it
leaves with Orbax alone.
"""

import sys

import numpy as np
import optax
import torch
from flax import nnx
from sklearn.metrics import roc_auc_score
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import replicax as rx

FEATURES, BATCH, EPOCHS = 20, 64, 10


class Payments(Dataset):
    """Payments and whether each is a fraud, as one in ten is."""

    def __init__(self, rows, seed):
        random = np.random.default_rng(seed)
        self.x = torch.from_numpy(random.normal(size=(rows, FEATURES)).astype(np.float32))
        score = self.x[:, :4].sum(1) + self.x[:, 4] * self.x[:, 5]
        self.fraud = (score > 2.9).float()

    def __len__(self):
        return len(self.fraud)

    def __getitem__(self, row):
        return {"x": self.x[row], "fraud": self.fraud[row]}


class Net(nnx.Module):
    """The logit of a fraud, with batch statistics and dropout."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(FEATURES, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))[:, 0]


def loss(model, batch, key):
    logits = model(batch["x"])
    values = optax.sigmoid_binary_cross_entropy(logits, batch["fraud"])
    return values, {"auc": rx.HostMetric(roc_auc_score, batch["fraud"] > 0.5, logits)}


def main(run_dir):
    dp = rx.DataParallel(loss, optax.adamw(2e-3))
    state = dp.init(Net(nnx.Rngs(0)))
    train = StatefulDataLoader(
        Payments(1_000, seed=0), BATCH, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    result = rx.fit(
        dp,
        state,
        train,
        eval_source=StatefulDataLoader(Payments(500, seed=1), BATCH),
        epochs=EPOCHS,
        run_dir=run_dir,
        saving=rx.Saving(every=10),
        hooks=[rx.hooks.WandB("fraud", mode="offline"), rx.hooks.KeepBest("auc")],
    )
    print(f"AUC {result.metrics['auc']:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

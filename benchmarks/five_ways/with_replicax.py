"""Replicax: a loss, an optimizer, and a folder."""

import jax
import optax
from job import ACCUMULATE, BATCH, EPOCHS, FOLDER, RATE, data, pause, save, weights

import replicax as rx

job = rx.initialize()


def loss(params, batch, key):
    w1, b1, w2, b2 = params
    logits = jax.nn.relu(batch["x"] @ w1 + b1) @ w2 + b2
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return rx.Weighted(losses, batch["mask"])


dp = rx.DataParallel(loss, optax.sgd(RATE), accumulate=ACCUMULATE, job=job)
state = dp.init(weights())
with rx.Run(
    dp,
    state,
    data(),
    batch_size=BATCH,
    epochs=EPOCHS,
    shuffle=False,
    run_dir=FOLDER,
    saving=rx.Saving(every=15),
    progress=False,
) as run:
    for batch in run:
        pause()
        run.step(batch)
save(dp.model(run.state))

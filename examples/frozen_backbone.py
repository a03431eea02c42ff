"""Fine-tuning: a new head on a frozen, pretrained network.

`trainable` is a regex on parameter paths; both the newest and the averaged head are evaluated.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, INPUTS, FEATURES, CLASSES = 84, 32, 16, 48, 4


def rows():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, INPUTS)).astype(np.float32)
    label = np.argmax(np.tanh(x @ random.normal(size=(INPUTS, CLASSES))), axis=1)
    return {"x": x, "label": label.astype(np.int32)}


def model():
    """A backbone, normally read from a file, and a new head."""
    keys = jax.random.split(jax.random.key(0), 2)
    backbone = [
        jax.random.normal(keys[0], (INPUTS, FEATURES)) / INPUTS**0.5,
        jax.random.normal(keys[1], (FEATURES, FEATURES)) / FEATURES**0.5,
    ]
    return {"backbone": backbone, "head": jnp.zeros((FEATURES, CLASSES))}


def loss(model, batch, key):
    features = batch["x"]
    for layer in model["backbone"]:
        features = jax.nn.relu(features @ layer)
    logits = features @ model["head"]
    right = jnp.argmax(logits, axis=1) == batch["label"]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return nats, {"accuracy": right}


def optimizer():
    return optax.adamw(1e-2)


def main():
    dp = rx.DataParallel(loss, optimizer(), trainable="head", ema=0.98)
    state = dp.init(model())
    for epoch in range(30):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            state, _ = dp.step(state, batch)
    for name, ema in (("newest", False), ("average", True)):
        found = dp.evaluate(state, rows(), batch_size=BATCH, ema=ema)
        print(f"{name}: loss {found['loss']:.4f} nats, accuracy {found['accuracy']:.3f}")


if __name__ == "__main__":
    main()

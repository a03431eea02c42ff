"""Sharpness-aware minimisation: every second step goes uphill first (optax.contrib.sam).

Any optax transformation can be passed unchanged.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import replicax as rx

ROWS, BATCH, INPUTS = 84, 32, 8


def rows():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, INPUTS)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, 0] * 2).astype(np.float32)}


def model():
    keys = jax.random.split(jax.random.key(0), 2)
    return {"in": jax.random.normal(keys[0], (INPUTS, 64)) / 3, "out": jnp.zeros(64)}


def loss(model, batch, key):
    return (jnp.tanh(batch["x"] @ model["in"]) @ model["out"] - batch["y"]) ** 2


def optimizer():
    uphill = optax.chain(optax.contrib.normalize(), optax.sgd(0.05))
    return optax.contrib.sam(optax.adam(1e-2), uphill, sync_period=2)


def main():
    dp = rx.DataParallel(loss, optimizer())
    state = dp.init(model())
    for epoch in range(60):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            state, metrics = dp.step(state, batch)
    print(f"squared error {metrics['loss']:.4f}")


if __name__ == "__main__":
    main()

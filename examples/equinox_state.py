"""An Equinox network with BatchNorm, whose updated state the loss returns.

The network and its state form an `rx.Stateful`, and the loss returns an `rx.NewState`.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH = 96, 32


def rows():
    """Points, with labels for whether each is inside a ring."""
    x = np.random.default_rng(0).normal(size=(ROWS, 2)).astype(np.float32)
    return {"x": x, "y": (np.abs(np.linalg.norm(x, axis=1) - 1) < 0.5).astype(np.float32)}


class Network(eqx.Module):
    """Two layers with BatchNorm between them."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.first = eqx.nn.Linear(2, 32, use_bias=False, key=first)
        self.norm = eqx.nn.BatchNorm(32, axis_name="rows", mode="batch")
        self.last = eqx.nn.Linear(32, 1, key=last)

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x))[0], state


def model():
    return rx.Stateful(*eqx.nn.make_with_state(Network)(jax.random.key(0)))


def loss(model, batch, key):
    network = jax.vmap(model.model, in_axes=(0, None), out_axes=(0, None), axis_name="rows")
    logits, state = network(batch["x"], model.state)
    right = {"accuracy": jnp.float32((logits > 0) == (batch["y"] > 0))}
    return rx.NewState((optax.sigmoid_binary_cross_entropy(logits, batch["y"]), right), state)


def optimizer():
    return optax.adam(1e-2)


def main():
    dp = rx.DataParallel(loss, optimizer())
    state = dp.init(model())
    for epoch in range(20):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            state, _ = dp.step(state, batch)
    print(dp.evaluate(state, rows(), batch_size=BATCH))


if __name__ == "__main__":
    main()

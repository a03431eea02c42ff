"""L-BFGS with optax's line search, on all rows in every step.

The search calls `rx.value_and_grad` in its loop and differentiates the loss that it returns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, INPUTS, WIDTH, STEPS, DECAY = 84, 2, 16, 60, 1e-4

optimizer = optax.lbfgs()


def rows():
    """Points of a plane, and a smooth height."""
    x = np.random.default_rng(0).uniform(-1, 1, size=(ROWS, INPUTS)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x[:, 0]) * np.cos(2 * x[:, 1])}


def state():
    """A two-layer network and its optimizer state."""
    first, last = jax.random.split(jax.random.key(0))
    model = {
        "in": jax.random.normal(first, (INPUTS, WIDTH)),
        "bias": jnp.linspace(-1, 1, WIDTH),
        "out": jax.random.normal(last, (WIDTH,)) / WIDTH**0.5,
    }
    return {"model": model, "memory": optimizer.init(model)}


def loss(model, batch, key):
    """Squared error of each row, and a penalty on the weights."""
    found = jnp.tanh(batch["x"] @ model["in"] + model["bias"]) @ model["out"]
    return (found - batch["y"]) ** 2 + DECAY * optax.tree.norm(model, squared=True)


def step(state, batch, key):
    def value(model):
        return rx.value_and_grad(loss)(model, batch, key)[0]["loss"]

    model, memory = state["model"], state["memory"]
    means, gradient = rx.value_and_grad(loss)(model, batch, key)
    updates, memory = optimizer.update(
        gradient, memory, model, value=means["loss"], grad=gradient, value_fn=value
    )
    rate = optax.tree.get(memory, "learning_rate")
    return {"model": optax.apply_updates(model, updates), "memory": memory}, {**means, "rate": rate}


def main():
    dp = rx.DataParallel(step=step)
    trained = dp.init(state())
    for epoch in range(STEPS):
        for batch in dp.feed(rows(), ROWS, epoch=epoch):
            trained, metrics = dp.step(trained, batch)
    print({name: round(float(value), 5) for name, value in metrics.items()})


if __name__ == "__main__":
    main()

"""MAML: an initialization from which one gradient step learns a new sine; a row is a task.

The gradient is taken through the inner step (second order); tasks are independent.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

TASKS, BATCH, POINTS, INNER_RATE = 84, 32, 10, 0.05


def rows():
    """`seen` and `asked` `[tasks, points, 2]`: points (x, y) on one sine per task."""
    random = np.random.default_rng(0)
    phase, height = random.uniform(0, np.pi, (TASKS, 1)), random.uniform(0.5, 2, (TASKS, 1))
    x = random.uniform(-3, 3, (2, TASKS, POINTS))
    points = np.stack([x, height * np.sin(x + phase)], axis=-1).astype(np.float32)
    return {"seen": points[0], "asked": points[1]}


def model():
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "in": jax.random.normal(keys[0], (1, 40)),
        "bias": jax.random.normal(keys[1], (40,)),
        "out": jnp.zeros(40),
    }


def error(model, points):
    found = jnp.tanh(points[:, :1] @ model["in"] + model["bias"]) @ model["out"]
    return jnp.mean((found - points[:, 1]) ** 2)


def loss(model, batch, key):
    """Squared error of each task after one step on its `seen` points."""

    def of_task(seen, asked):
        gradient = jax.grad(error)(model, seen)
        learned = jax.tree.map(lambda leaf, by: leaf - INNER_RATE * by, model, gradient)
        return error(learned, asked)

    return jax.vmap(of_task)(batch["seen"], batch["asked"])


def optimizer():
    return optax.adam(3e-3)


def main():
    dp = rx.DataParallel(loss, optimizer(), mode="shard_map")
    state = dp.init(model())
    for epoch in range(100):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            state, metrics = dp.step(state, batch)
    print(f"squared error after one step {metrics['loss']:.3f}")


if __name__ == "__main__":
    main()

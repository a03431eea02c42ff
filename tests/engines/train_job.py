"""A user's training run, the same under every engine: train_job.py WEIGHTS.npz."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, EPOCHS = 51, 3


def make_model() -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(1))
    return {
        "hidden": jax.random.normal(first, (8, 32)) / 3,
        "bias": jnp.zeros(32),
        "out": jax.random.normal(second, (32, 4)) / 6,
    }


def loss(model: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ model["hidden"] + model["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ model["out"], batch["y"])


def main(path: str) -> None:
    job = rx.initialize()
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, 8)).astype(np.float32)
    source = {"x": x, "y": (x[:, :4] + x[:, 4:]).argmax(axis=1).astype(np.int32)}
    dp = rx.DataParallel(loss, optax.adamw(1e-2), job=job)
    state = dp.init(make_model())
    for _ in range(EPOCHS):
        for batch in dp.feed(source, batch_size=16):  # the last of an epoch has 3 rows
            state, metrics = dp.step(state, batch)
    assert jax.device_count() == 2
    print(f"process {job.process} of {job.processes}: {float(metrics['loss']):.6f}")
    if job.process == 0:
        np.savez(path, **{name: np.asarray(value) for name, value in dp.model(state).items()})


if __name__ == "__main__":
    main(sys.argv[1])

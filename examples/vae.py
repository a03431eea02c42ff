"""A variational autoencoder whose KL term is warmed up over the first steps.

The loss gets the step from `rx.step_number()`, so the schedule needs no recompilation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, SIDE, LATENT, WARMUP = 84, 32, 8, 2, 60


def rows():
    """Images `[rows, 64]` of a bar at a random position."""
    random = np.random.default_rng(0)
    images = np.zeros((ROWS, SIDE, SIDE), np.float32)
    for image, place, upright in zip(images, random.integers(SIDE, size=ROWS), random.random(ROWS)):
        (image.T if upright < 0.5 else image)[place] = 1
    return {"x": images.reshape(ROWS, -1)}


def model():
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"in": (SIDE**2, 64), "latent": (64, 2 * LATENT), "back": (LATENT, 64)}
    sizes["out"] = (64, SIDE**2)
    return {
        name: jax.random.normal(key, size) / size[0] ** 0.5
        for key, (name, size) in zip(keys, sizes.items())
    }


def loss(model, batch, key):
    """The negative evidence lower bound of each row, in nats; evaluation uses the mean code."""
    mean, log_scale = jnp.split(jax.nn.gelu(batch["x"] @ model["in"]) @ model["latent"], 2, axis=1)
    noise = 0.0 if key is None else jax.random.normal(key, mean.shape)
    code = mean + jnp.exp(log_scale) * noise
    logits = jax.nn.gelu(code @ model["back"]) @ model["out"]
    of_pixels = jnp.sum(optax.sigmoid_binary_cross_entropy(logits, batch["x"]), axis=1)
    divergence = jnp.sum(mean**2 + jnp.exp(2 * log_scale) - 1 - 2 * log_scale, axis=1) / 2
    share = jnp.minimum(1.0, rx.step_number() / WARMUP)
    return of_pixels + share * divergence, {"divergence": divergence}


def optimizer():
    return optax.adam(3e-3)


def main():
    dp = rx.DataParallel(loss, optimizer())
    state = dp.init(model())
    for epoch in range(60):
        for batch in dp.feed(rows(), 28, shuffle=True, epoch=epoch):
            state, metrics = dp.step(state, batch)
    print({name: round(float(value), 3) for name, value in metrics.items()})


if __name__ == "__main__":
    main()

"""DDPM on points of a ring, sampled from the moving average of the parameters.

Each row draws its time and noise from a key of its own, so they are the same on any device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, TIMES, WIDTH, SHARPEST = 84, 32, 50, 64, 4

kept = np.cumprod(1 - np.linspace(1e-3, 0.2, TIMES, dtype=np.float32))
"""The share of the signal's variance at each time."""


def rows():
    """Points of a ring, and the number of each row."""
    angle = np.random.default_rng(0).uniform(0, 2 * np.pi, size=ROWS)
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return {"x": x.astype(np.float32), "row": np.arange(ROWS)}


def model():
    inner, middle, last = jax.random.split(jax.random.key(0), 3)
    inputs = 2 + 2 * SHARPEST
    return {
        "in": jax.random.normal(inner, (inputs, WIDTH)) / inputs**0.5,
        "bias": jnp.linspace(-1, 1, WIDTH),
        "middle": jax.random.normal(middle, (WIDTH, WIDTH)) / WIDTH**0.5,
        "out": jax.random.normal(last, (WIDTH, 2)) / WIDTH,
    }


def noise_in(model, x, time):
    """Predict the noise that `x` `[rows, 2]` contains."""
    angle = time[:, None] / TIMES * jnp.pi * jnp.arange(1, SHARPEST + 1)
    seen = jnp.concatenate([x, jnp.sin(angle), jnp.cos(angle)], axis=1)
    hidden = jax.nn.gelu(seen @ model["in"] + model["bias"])
    return jax.nn.gelu(hidden @ model["middle"]) @ model["out"]


def draw(key, row):
    """Draw the time and the noise of one row."""
    for_time, for_noise = jax.random.split(jax.random.fold_in(key, row))
    return jax.random.randint(for_time, (), 0, TIMES), jax.random.normal(for_noise, (2,))


def loss(model, batch, key):
    """Squared error of the predicted noise, at a random time for each row."""
    of_step = jax.random.fold_in(jax.random.key(1), rx.step_number())
    time, noise = jax.vmap(draw, (None, 0))(of_step, batch["row"])
    share = jnp.asarray(kept)[time][:, None]
    x = jnp.sqrt(share) * batch["x"] + jnp.sqrt(1 - share) * noise
    return (noise_in(model, x, time) - noise) ** 2


def optimizer():
    return optax.adam(1e-2)


def sample(model, count):
    """Denoise `count` points of pure noise, one time after the other."""

    def earlier(x, drawn):
        time, key = drawn
        share, before = jnp.asarray(kept)[time], jnp.asarray(kept)[jnp.maximum(time - 1, 0)]
        before = jnp.where(time > 0, before, 1.0)
        step = 1 - share / before
        noise = noise_in(model, x, jnp.full(count, time))
        x = (x - step / jnp.sqrt(1 - share) * noise) / jnp.sqrt(1 - step)
        spread = jnp.sqrt(step * (1 - before) / (1 - share))
        return x + spread * jax.random.normal(key, x.shape), None

    keys = jax.random.split(jax.random.key(2), TIMES)
    start = jax.random.normal(jax.random.key(3), (count, 2))
    return jax.lax.scan(earlier, start, (jnp.arange(TIMES)[::-1], keys))[0]


def main():
    dp = rx.DataParallel(loss, optimizer(), ema=0.99)
    state = dp.init(model())
    for epoch in range(500):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            state, metrics = dp.step(state, batch)
    points = sample(dp.model(state, ema=True), 200)
    off = jnp.mean(jnp.abs(jnp.linalg.norm(points, axis=1) - 1))
    print(f"loss {metrics['loss']:.3f}, samples {off:.3f} off the ring")


if __name__ == "__main__":
    main()

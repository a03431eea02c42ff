"""VQ-VAE: a codebook that is a moving average of the codes assigned to it.

`rx.mean` counts and sums the codes of all rows without padding, so every mode has them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, SIDE, PARTS, CODES, DEPTH, WIDTH = 84, 32, 8, 4, 16, 4, 64
COMMITMENT, DECAY = 0.25, 0.95

optimizer = optax.adam(3e-3)


def rows():
    """Images `[rows, 4, 16]`, four quarters with a bar each."""
    random, half = np.random.default_rng(0), SIDE // 2
    images = np.zeros((ROWS, PARTS, half, half), np.float32)
    for quarter in images.reshape(-1, half, half):
        (quarter.T if random.random() < 0.5 else quarter)[random.integers(half)] = 1
    return {"x": images.reshape(ROWS, PARTS, -1)}


def state():
    """An encoder and a decoder of quarters, their optimizer state, and the codebook."""
    keys = jax.random.split(jax.random.key(0), 5)
    pixels = SIDE**2 // PARTS
    sizes = {"in": (pixels, WIDTH), "code": (WIDTH, DEPTH)}
    sizes |= {"back": (DEPTH, WIDTH), "out": (WIDTH, pixels)}
    model = {
        name: jax.random.normal(key, size) / size[0] ** 0.5
        for key, (name, size) in zip(keys, sizes.items())
    }
    codes = jax.random.normal(keys[4], (CODES, DEPTH)) / 2
    book = {"count": jnp.full(CODES, PARTS / CODES), "sum": codes * PARTS / CODES}
    return {"model": model, "moments": optimizer.init(model), "book": book}


def encode(model, x):
    return jax.nn.gelu(x @ model["in"]) @ model["code"]


def loss(model, batch, key):
    """Squared error of each quarter, and the distance of its code from the codebook's."""
    found = encode(model, batch["x"])
    passed = found + jax.lax.stop_gradient(batch["nearest"] - found)  # straight through
    error = jnp.mean((jax.nn.gelu(passed @ model["back"]) @ model["out"] - batch["x"]) ** 2, axis=2)
    distance = jnp.mean((found - batch["nearest"]) ** 2, axis=2)
    return error + COMMITMENT * distance, {"error": error, "distance": distance}


def step(state, batch, key):
    codes = state["book"]["sum"] / state["book"]["count"][:, None]
    found = encode(state["model"], batch["x"])
    far = jnp.sum((found[:, :, None] - codes) ** 2, axis=3)
    chosen = jax.nn.one_hot(jnp.argmin(far, axis=2), CODES)
    seen = {"x": batch["x"], "nearest": chosen @ codes}
    means, gradient = rx.value_and_grad(loss)(state["model"], seen, key)
    updates, moments = optimizer.update(gradient, state["moments"], state["model"])
    model = optax.apply_updates(state["model"], updates)
    new = {"count": jnp.sum(chosen, axis=1), "sum": jnp.einsum("rpk,rpd->rkd", chosen, found)}
    new = rx.mean(new)
    book = optax.incremental_update(new, state["book"], 1 - DECAY)
    book["count"] = jnp.maximum(book["count"], 1e-3)  # an unused code stays finite
    used = jnp.exp(jnp.sum(jax.scipy.special.entr(new["count"] / PARTS)))
    return {"model": model, "moments": moments, "book": book}, {**means, "codes": used}


def main():
    dp = rx.DataParallel(step=step)
    trained = dp.init(state())
    for epoch in range(100):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            trained, metrics = dp.step(trained, batch)
    print({name: round(float(value), 3) for name, value in metrics.items()})


if __name__ == "__main__":
    main()

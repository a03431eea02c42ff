"""DP-SGD: the gradient of each row is clipped, then noise is added to their mean.

`rx.mean` takes the pytree of gradients `[rows, ...]`; the key of the noise is in the state.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, INPUTS, WIDTH, CLASSES = 84, 32, 6, 16, 3
CLIP, NOISE = 1.0, 0.5

optimizer = optax.adam(1e-2)


def rows():
    """Points around one place per class."""
    random = np.random.default_rng(0)
    places, label = random.normal(size=(CLASSES, INPUTS)), random.integers(CLASSES, size=ROWS)
    x = places[label] + random.normal(size=(ROWS, INPUTS)) / 2
    return {"x": x.astype(np.float32), "label": label}


def state():
    """A two-layer network, its optimizer state, and the key that the noise is drawn from."""
    first, last, noise = jax.random.split(jax.random.key(0), 3)
    model = {
        "in": jax.random.normal(first, (INPUTS, WIDTH)) / INPUTS**0.5,
        "out": jax.random.normal(last, (WIDTH, CLASSES)) / WIDTH**0.5,
    }
    return {"model": model, "moments": optimizer.init(model), "key": noise}


def loss(model, row):
    """Cross-entropy of one row."""
    logits = jnp.tanh(row["x"] @ model["in"]) @ model["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, row["label"])


def clipped_gradient(model, row):
    """Return the loss of one row, its gradient with a norm of at most CLIP, and that norm."""
    value, gradient = jax.value_and_grad(loss)(model, row)
    norm = optax.tree.norm(gradient)
    share = jnp.minimum(1, CLIP / norm)
    return value, jax.tree.map(lambda leaf: share * leaf, gradient), norm


def step(state, batch, key):
    drawn, after = jax.random.split(state["key"])
    of_rows = jax.vmap(clipped_gradient, (None, 0))(state["model"], batch)
    value, gradient, norm = rx.mean(of_rows)
    count = jnp.sum(rx.gather(rx.row_weights(batch["label"])))  # rows without padding
    noise = optax.tree.random_like(drawn, gradient, jax.random.normal)
    gradient = optax.tree.add_scale(gradient, NOISE * CLIP / count, noise)
    updates, moments = optimizer.update(gradient, state["moments"], state["model"])
    model = optax.apply_updates(state["model"], updates)
    return {"model": model, "moments": moments, "key": after}, {"loss": value, "norm": norm}


def main():
    dp = rx.DataParallel(step=step)
    trained = dp.init(state())
    for epoch in range(40):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            trained, metrics = dp.step(trained, batch)
    print({name: round(float(value), 3) for name, value in metrics.items()})


if __name__ == "__main__":
    main()

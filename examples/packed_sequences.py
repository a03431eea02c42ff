"""A language model on packed rows: several texts share a row, without attending to each other.

All positions have equal weight, whatever their row: `rx.Weighted` divides once, over all devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, LENGTH, TOKENS, WIDTH = 84, 32, 24, 11, 32


def rows():
    """`token` and `text` `[rows, length]`: counting sequences, and text ids (0 is padding)."""
    random = np.random.default_rng(0)
    token, text = np.zeros((2, ROWS, LENGTH), np.int32)
    for row in range(ROWS):
        at, number = 0, 1
        while at < LENGTH - random.integers(3, 9):
            size = min(int(random.integers(3, 9)), LENGTH - at)
            token[row, at : at + size] = (random.integers(TOKENS) + np.arange(size)) % TOKENS
            text[row, at : at + size] = number
            at, number = at + size, number + 1
    return {"token": token, "text": text}


def model():
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"embed": (TOKENS, WIDTH), "place": (LENGTH, WIDTH)}
    shapes |= {"mix": (WIDTH, 3 * WIDTH), "out": (WIDTH, TOKENS)}
    return {
        name: jax.random.normal(key, shape) / WIDTH**0.5
        for key, (name, shape) in zip(keys, shapes.items())
    }


def logits(model, token, text):
    x = model["embed"][token] + model["place"]
    query, key, value = jnp.split(x @ model["mix"], 3, axis=-1)
    same = (text[:, :, None] == text[:, None, :]) & jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    scores = jnp.where(same, query @ jnp.swapaxes(key, 1, 2) / WIDTH**0.5, -1e30)
    return (x + jax.nn.softmax(scores) @ value) @ model["out"]


def loss(model, batch, key):
    """Cross-entropy of the next token of the same text, in nats per token."""
    found = logits(model, batch["token"], batch["text"])[:, :-1]
    nats = optax.softmax_cross_entropy_with_integer_labels(found, batch["token"][:, 1:])
    text = batch["text"]
    return rx.Weighted(nats, (text[:, 1:] == text[:, :-1]) & (text[:, 1:] > 0))


def optimizer():
    return optax.adam(1e-2)


def main():
    dp = rx.DataParallel(loss, optimizer(), mode="shard_map", accumulate=2)
    state = dp.init(model())
    for epoch in range(40):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            state, metrics = dp.step(state, batch)
    print(f"loss {metrics['loss']:.3f} nats per token")


if __name__ == "__main__":
    main()

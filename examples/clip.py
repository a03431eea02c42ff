"""Contrastive training: every image is compared with all texts of the global batch.

`rx.gather` collects the rows of all devices, and `rx.row_weights` masks padding in the last batch.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, PIXELS, WORDS, WIDTH = 84, 32, 24, 16, 12


def rows():
    """Images and texts generated from shared latent vectors."""
    random = np.random.default_rng(0)
    hidden = random.normal(size=(ROWS, 6))
    image, text = (hidden @ random.normal(size=(6, size)) for size in (PIXELS, WORDS))
    return {"image": image.astype(np.float32), "text": text.astype(np.float32)}


def model():
    """Two two-layer towers, and a temperature."""
    image, text = jax.random.split(jax.random.key(0))
    return {"image": tower(image, PIXELS), "text": tower(text, WORDS), "scale": jnp.float32(1.0)}


def tower(key, inputs):
    first, last = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (inputs, 32)) / inputs**0.5,
        "out": jax.random.normal(last, (32, WIDTH)) / 32**0.5,
    }


def embed(tower, x):
    found = jax.nn.gelu(x @ tower["in"]) @ tower["out"]
    return found / jnp.linalg.norm(found, axis=1, keepdims=True)


def loss(model, batch, key):
    """Symmetric cross-entropy of each row's pair among all pairs."""
    image, text = embed(model["image"], batch["image"]), embed(model["text"], batch["text"])
    images, texts, real = rx.gather((image, text, rx.row_weights(image)))
    scale = jnp.exp(model["scale"])
    among_all = partial(jax.nn.logsumexp, axis=1, b=real)
    of_image, of_text = among_all(scale * image @ texts.T), among_all(scale * text @ images.T)
    return (of_image + of_text) / 2 - scale * jnp.sum(image * text, axis=1)


def optimizer():
    return optax.adam(3e-3)


def main():
    dp = rx.DataParallel(loss, optimizer(), mode="shard_map")
    state = dp.init(model())
    for epoch in range(40):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            state, metrics = dp.step(state, batch)
    print(f"loss {metrics['loss']:.3f} nats, {np.log(BATCH):.3f} by chance")


if __name__ == "__main__":
    main()

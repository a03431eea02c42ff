"""LoRA in Flax NNX: two small matrices are trained next to each frozen one.

With `trainable=nnx.LoRAParam`, the rest has no gradient, all-reduce, or optimizer state.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import replicax as rx

ROWS, BATCH, INPUTS, CLASSES = 84, 32, 16, 4


class Network(nnx.Module):
    """Two dense layers with adapters, and a frozen head."""

    def __init__(self, rngs):
        self.first = nnx.LoRALinear(INPUTS, 64, lora_rank=2, rngs=rngs)
        self.second = nnx.LoRALinear(64, 64, lora_rank=2, rngs=rngs)
        self.head = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.gelu(self.second(nnx.gelu(self.first(x)))))


def rows():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, INPUTS)).astype(np.float32)
    label = np.argmax(x @ random.normal(size=(INPUTS, CLASSES)), axis=1)
    return {"x": x, "label": label.astype(np.int32)}


def model():
    return Network(nnx.Rngs(0))


def loss(model, batch, key):
    logits = model(batch["x"])
    right = jnp.argmax(logits, axis=1) == batch["label"]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return nats, {"accuracy": right}


def optimizer():
    return optax.adam(3e-3)


def main():
    dp = rx.DataParallel(loss, optimizer(), trainable=nnx.LoRAParam)
    state = dp.init(model())
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state)) // 2
    print(f"{trained:,} of {sum(leaf.size for leaf in jax.tree.leaves(state.params)):,} train")
    for epoch in range(100):
        for batch in dp.feed(rows(), BATCH, shuffle=True, epoch=epoch):
            state, _ = dp.step(state, batch)
    print(f"accuracy {dp.evaluate(state, rows(), batch_size=BATCH)['accuracy']:.3f}")


if __name__ == "__main__":
    main()

"""Truncated backpropagation through time: the hidden state of each stream goes on in the next step.

`rx.ByRow` marks it in the state; in the step it has the rows of the batch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, BATCH, SPAN, WIDTH = 84, 32, 16, 48
WORDS = "the cat sat on a mat and then ran far from the old red hen"
LETTERS = sorted({*WORDS})

optimizer = optax.adam(1e-2)


def rows():
    """A text in 32 streams: a row continues the row at the same place of the batch before.

    The last 12 streams are shorter by a row, so the last batch has 20 rows.
    """
    random = np.random.default_rng(0)
    text = " ".join(random.choice(WORDS.split(), size=ROWS * SPAN // 3))
    letters = np.array([LETTERS.index(letter) for letter in text])
    of_stream = [len(range(stream, ROWS, BATCH)) for stream in range(BATCH)]
    begin = np.cumsum([0, *of_stream[:-1]]) * SPAN
    span = np.array([begin[row % BATCH] + row // BATCH * SPAN for row in range(ROWS)])
    place = span[:, None] + np.arange(SPAN + 1)
    return {"letters": letters[place], "first": np.arange(ROWS) < BATCH}


def state():
    """A recurrent network, its optimizer state, and the hidden state of each stream."""
    keys = jax.random.split(jax.random.key(0), 3)
    model = {
        "letter": jax.random.normal(keys[0], (len(LETTERS), WIDTH)) / 2,
        "hidden": jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH**0.5,
        "out": jax.random.normal(keys[2], (WIDTH, len(LETTERS))) / WIDTH**0.5,
    }
    hidden = rx.ByRow(jnp.zeros((BATCH, WIDTH)))
    return {"model": model, "moments": optimizer.init(model), "hidden": hidden}


def loss(model, batch, key):
    """Cross-entropy of each next letter; the hidden state after the span is returned by row."""

    def read(hidden, letter):
        hidden = jnp.tanh(model["letter"][letter] + hidden @ model["hidden"])
        return hidden, hidden @ model["out"]

    seen, following = batch["letters"][:, :-1], batch["letters"][:, 1:]
    hidden, logits = jax.lax.scan(read, batch["hidden"], seen.T)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, following.T)
    return found.T, {"hidden": rx.ByRow(hidden)}


def step(state, batch, key):
    hidden = jnp.where(batch["first"][:, None], 0, state["hidden"].value)
    seen = {"letters": batch["letters"], "hidden": hidden}
    means, gradient, of_rows = rx.value_and_grad(loss, rows=True)(state["model"], seen, key)
    updates, moments = optimizer.update(gradient, state["moments"], state["model"])
    model = optax.apply_updates(state["model"], updates)
    hidden = rx.ByRow(of_rows["hidden"])
    return {"model": model, "moments": moments, "hidden": hidden}, {"loss": means["loss"]}


def main():
    dp = rx.DataParallel(step=step)
    trained = dp.init(state())
    for epoch in range(60):
        for batch in dp.feed(rows(), BATCH, epoch=epoch):
            trained, metrics = dp.step(trained, batch)
    print(f"loss {metrics['loss']:.3f}, of random letters {np.log(len(LETTERS)):.3f}")


if __name__ == "__main__":
    main()

"""Translation with a small Transformer: learning rate warm-up and decay, and the best BLEU.

`rx.Run` yields the batches. The terms of BLEU are means over all rows of the held-out set; a hook
combines them into one number, and remembers the best across restarts.
"""

import argparse
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx

ROWS, HELD_OUT, BATCH, STEPS = 1044, 200, 256, 300
WORDS, LONGEST, WIDTH, HEADS = 9, 6, 32, 4
END, BEGIN = 0, WORDS + 1  # words are 1 to WORDS; END follows the last one


def rows(count=ROWS, seed=0):
    """Sentences and their translations: each word substituted, in reverse order."""
    random = np.random.default_rng(seed)
    dictionary = 1 + np.random.default_rng(99).permutation(WORDS)
    source = np.zeros((count, LONGEST), np.int32)
    target = np.zeros((count, LONGEST + 1), np.int32)
    for row, length in enumerate(random.integers(4, LONGEST + 1, size=count)):
        source[row, :length] = random.integers(1, WORDS + 1, size=length)
        target[row, :length] = dictionary[source[row, :length][::-1] - 1]
    return {"source": source, "target": target}


def model():
    random = np.random.default_rng(1)

    def matrix(*shape):
        return jnp.asarray(random.normal(size=shape) / math.sqrt(shape[0]), jnp.float32)

    def attention():
        return {name: matrix(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}

    def layer(*names):
        wide = {"up": matrix(WIDTH, 2 * WIDTH), "down": matrix(2 * WIDTH, WIDTH)}
        return {name: attention() for name in names} | wide

    return {
        "words": matrix(WORDS + 2, WIDTH),
        "places": matrix(LONGEST + 1, WIDTH),
        "encoder": layer("itself"),
        "decoder": layer("itself", "source"),
    }


def normal(x):
    return (x - jnp.mean(x, -1, keepdims=True)) * jax.lax.rsqrt(
        jnp.var(x, -1, keepdims=True) + 1e-6
    )


def attend(attention, x, to, mask):
    def heads(x, name):
        return (x @ attention[name]).reshape(*x.shape[:2], HEADS, -1)

    query, key, value = heads(x, "query"), heads(to, "key"), heads(to, "value")
    found = jax.nn.dot_product_attention(query, key, value, mask=mask)
    return found.reshape(x.shape) @ attention["out"]


def embed(model, tokens):
    return 7 * model["words"][tokens] + model["places"][: tokens.shape[1]]


def encode(model, source):
    x, layer = embed(model, source), model["encoder"]
    mask = (source != END)[:, None, None, :]
    x += attend(layer["itself"], normal(x), normal(x), mask)
    return normal(x + jax.nn.relu(normal(x) @ layer["up"]) @ layer["down"]), mask


def decode(model, encoded, target):
    """Logits of the word after each word of `target`, which begins with BEGIN."""
    (source, mask), x, layer = encoded, embed(model, target), model["decoder"]
    before = jnp.tri(target.shape[1], dtype=bool)[None, None]
    x += attend(layer["itself"], normal(x), normal(x), before)
    x += attend(layer["source"], normal(x), source, mask)
    x += jax.nn.relu(normal(x) @ layer["up"]) @ layer["down"]
    return normal(x) @ model["words"].T


def loss(model, batch, key):
    """Nats of each word and of the first END; later positions have zero weight."""
    target = batch["target"]
    before = jnp.pad(target, ((0, 0), (1, 0)), constant_values=BEGIN)[:, :-1]
    logits = decode(model, encode(model, batch["source"]), before)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, target)
    return rx.Weighted(nats, (before != END).astype(jnp.float32))


def translate(model, source):
    """Greedy decoding until END."""
    encoded = encode(model, source)

    def extend(place, said):
        words = jnp.argmax(decode(model, encoded, said)[:, place], axis=-1)
        return said.at[:, place + 1].set(jnp.where(said[:, place] == END, END, words))

    said = jnp.full((len(source), LONGEST + 1), END).at[:, 0].set(BEGIN)
    return jax.lax.fori_loop(0, LONGEST, extend, said)[:, 1:]


def matches(said, meant, size):
    """The fraction of each row's n-grams that are in `meant`, weighted by their number."""

    def grams(words):
        places = jnp.arange(LONGEST - size + 1)[:, None] + jnp.arange(size)
        return words[:, places], jnp.all(words[:, places] != END, axis=-1)

    (mine, real), (theirs, there) = grams(said), grams(meant)
    twins = jnp.all(mine[:, :, None] == mine[:, None], axis=-1) & real[:, None]
    earlier = jnp.sum(twins & jnp.tri(mine.shape[1], k=-1, dtype=bool), axis=-1)
    found = jnp.sum(jnp.all(mine[:, :, None] == theirs[:, None], axis=-1) & there[:, None], axis=-1)
    count = jnp.sum(real, axis=-1)
    return rx.Weighted(jnp.sum(real & (earlier < found), axis=-1) / jnp.maximum(count, 1), count)


def scores(model, batch, key):
    """The loss, and the terms of BLEU."""
    said, meant = translate(model, batch["source"]), batch["target"][:, :-1]
    length, wanted = (jnp.sum(words != END, axis=-1) for words in (said, meant))
    shares = {f"{size}-grams": matches(said, meant, size) for size in (1, 2, 3, 4)}
    return loss(model, batch, key), {**shares, "length": rx.Weighted(length / wanted, wanted)}


class Bleu(rx.Hook):
    """Record BLEU after each evaluation; checkpoints store the best."""

    def __init__(self):
        self.best = {"bleu": 0.0, "step": 0}

    def evaluation(self, run, record):
        shares = [max(record.metrics[f"{size}-grams"], 1e-9) for size in (1, 2, 3, 4)]
        brevity = min(0.0, 1 - 1 / max(record.metrics["length"], 1e-9))
        bleu = 100 * math.exp(brevity + sum(map(math.log, shares)) / 4)
        run.keep(dataclasses.replace(record, kind="bleu", metrics={"bleu": bleu}))
        run.say(f"step {record.step} · BLEU {bleu:.1f}")
        if bleu > self.best["bleu"]:
            self.best = {"bleu": bleu, "step": record.step}

    def save_state(self):
        return self.best

    def load_state(self, state):
        self.best = state

    def summary(self):
        return ["best   BLEU {bleu:.1f} at step {step}".format(**self.best)]


def optimizer(steps=STEPS):
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 10, steps))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", help="folder to save the run in, and to resume it from")
    parser.add_argument("--steps", type=int, default=STEPS)
    flags = parser.parse_args()
    dp = rx.DataParallel(loss, optimizer(flags.steps))
    state = dp.init(model())
    with rx.Run(
        dp,
        state,
        rows(),
        batch_size=BATCH,
        steps=flags.steps,
        eval_source=rx.Evaluation(
            rows(HELD_OUT, 1), every_epochs=None, every_steps=40, loss=scores
        ),
        hooks=[Bleu()],
        run_dir=flags.run_dir,
        saving=rx.Saving(every=20),
    ) as run:
        for batch in run:
            run.step(batch)
    source = rows(3, 2)["source"]
    for words, said in zip(source, translate(dp.model(run.state), jnp.asarray(source))):
        print(*words[words != END], "->", *said[said != END])


if __name__ == "__main__":
    main()

"""LoRA from end to end: a GPT-2 file, streamed text, samples as it learns, small weights to keep.

`python finetune_lora.py runs/pages` fine-tunes a network that knows Python code on the prose of
Python's `help()`. The network is a file with GPT-2's published names, `base.safetensors` in that
folder; if there is none, `replicax train` makes one of two layers first. Kill it at any moment and
start it again.
"""

import itertools
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from replicax.recipes import transformer
from replicax.recipes.gpt2 import sample
from replicax.recipes.text import packed
from replicax.recipes.text_columns import Document
from replicax.recipes.tokenizer import ByteTokenizer

LAYERS, HEADS, WIDTH, CONTEXT = 2, 2, 64, 64
BASE_STEPS, STEPS, BATCH, RANK = 500, 200, 32, 4
MATRICES = {"attn": ("c_attn", "c_proj"), "mlp": ("c_fc", "c_proj")}
PROMPT = "The statement "
TOKENIZER = ByteTokenizer()
SHAPE = transformer.Shape(LAYERS, HEADS, WIDTH, CONTEXT, TOKENIZER.vocab_size)


def make_base(folder):
    """Train a small GPT-2 on some of Python's source code, and export it."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [library / name for name in ("asyncio", "email", "http", "unittest")]
    sizes = ["--layers", LAYERS, "--heads", HEADS, "--width", WIDTH, "--context", CONTEXT]
    how = ["--separate-documents", "--batch-size", BATCH, "--steps", BASE_STEPS]
    train = ["train", "gpt2", "--data", *texts, *sizes, *how, "--run", "base"]
    for arguments in (train, ["export", "base", "base.safetensors"]):
        command = [sys.executable, "-m", "replicax", *map(str, arguments)]
        subprocess.run(command, check=True, cwd=folder)


class Pages:
    """Batches of packed rows of text. Pages are read as they are needed, and never held in all."""

    def __init__(self, names):
        self.names = names

    def __iter__(self):
        rows = self.rows()
        while batch := list(itertools.islice(rows, BATCH)):
            yield jax.tree.map(lambda *leaves: np.stack(leaves), *batch)

    def rows(self):
        pages = (Document(name, topics[name].encode()) for name in self.names)
        while some := list(itertools.islice(pages, 4)):
            arrays = packed(TOKENIZER, some, CONTEXT)
            for row in range(len(arrays["length"])):
                yield {name: arrays[name][row] for name in ("tokens", "length")}


def adapters(base, key):
    """Two small matrices for each large one, `[layers, inputs, RANK]` and `[layers, RANK, ...]`."""
    keys = iter(jax.random.split(key, 4))

    def pair(weight):
        layers, inputs, *outputs = weight.shape
        a = jax.random.normal(next(keys), (layers, inputs, RANK)) / np.sqrt(inputs)
        return {"a": a, "b": jnp.zeros((layers, RANK, *outputs))}

    return {
        part: {name: pair(base["h"][part][name]["weight"]) for name in names}
        for part, names in MATRICES.items()
    }


def merged(model):
    """The network with its adapters added to the matrices: GPT-2 again."""
    blocks = dict(model["base"]["h"])
    for part, pairs in model["lora"].items():
        blocks[part] = {
            name: {**blocks[part][name], "weight": blocks[part][name]["weight"] + product(pair)}
            for name, pair in pairs.items()
        }
    return {**model["base"], "h": blocks}


def product(pair):
    return jnp.einsum("lir,lr...->li...", pair["a"], pair["b"])


def logits(params, tokens):
    return transformer.logits(params, tokens, HEADS, separator=TOKENIZER.end_of_text)


def loss(model, batch, key):
    """Nats per token; the padding of the last row of a few pages has no weight."""
    tokens = batch["tokens"].astype(jnp.int32)
    scores = logits(merged(model), tokens[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(scores, tokens[:, 1:])
    return rx.Weighted(nats, jnp.arange(CONTEXT) < batch["length"][:, None])


class Samples(rx.Hook):
    """Continues a text after each evaluation."""

    def __init__(self, dp):
        self.dp = dp

    def evaluation(self, run, record):
        params = merged(self.dp.model(run.state, copy=False))
        prompt = [TOKENIZER.end_of_text, *PROMPT.encode()]
        how = {"count": 60, "context": CONTEXT, "end": TOKENIZER.end_of_text, "temperature": 0.5}
        run.say(f"sample {PROMPT + TOKENIZER.decode(sample(logits, params, prompt, **how))!r}")


def main(folder):
    began, folder = time.perf_counter(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "base.safetensors").exists():
        make_base(folder)
    tuned = time.perf_counter()

    shapes = jax.eval_shape(lambda: transformer.init(SHAPE, jax.random.key(0)))
    base = rx.load_weights(shapes, folder / "base.safetensors", rename=transformer.GPT2_NAMES)
    dp = rx.DataParallel(loss, optax.adam(1e-2), trainable=r"^\['lora'\]")
    state = dp.init({"base": base, "lora": adapters(base, jax.random.key(1))})
    print(dp.summary(state))
    names = sorted(topics)
    held_out = names[::10]
    result = rx.fit(
        dp,
        state,
        Pages([name for name in names if name not in held_out]),
        steps=STEPS,
        eval_source=rx.Evaluation(Pages(held_out), every_steps=STEPS // 2, at_start=True),
        run_dir=folder / "run",
        hooks=[Samples(dp)],
    )

    model = dp.model(result.state)
    rx.save_weights(model["lora"], folder / "lora.safetensors")
    rx.save_weights(merged(model), folder / "tuned.safetensors", rename=transformer.GPT2_NAMES)
    losses = [record.metrics["loss"] for record in result.records if record.kind == "eval"]
    found = dp.summary(result.state)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {found.trained:,} parameters trained")
    for name in ("base", "lora", "tuned"):
        print(f"{name}.safetensors {(folder / f'{name}.safetensors').stat().st_size:,} bytes")
    seconds = time.perf_counter() - tuned
    print(f"{tuned - began:.0f} s for the base, {seconds:.0f} s for LoRA")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Training steps of Replicax in one of several processes, for processes.py.

Answers a number of steps with the seconds per step and their losses.
"""

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from gpt import OPTIMIZER, cross_entropy
from process_group import serve

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.recipes import lenet, transformer
from replicax.train.run.host_memory import keep_freed_memory

SHAPE = transformer.Shape(layers=4, heads=4, width=128, context=128, vocab_size=257)
SGD = {"learning_rate": 0.05, "momentum": 0.9}


def gpt_loss(model: transformer.Params, batch: dict[str, jax.Array], key: Any) -> jax.Array:
    tokens = batch["tokens"]
    logits = transformer.logits(model, tokens[:, :-1], SHAPE.heads, "selective")
    return cross_entropy(logits, tokens[:, 1:])


def lenet_loss(model: lenet.Params, batch: dict[str, jax.Array], key: Any) -> jax.Array:
    return cross_entropy(lenet.logits(model, batch["image"]), batch["label"])


def start(name: str) -> Any:
    """Return the initial parameters."""
    key = jax.random.key(0)
    return transformer.init(SHAPE, key) if name == "gpt" else lenet.LeNet().model(key)


def prepare(folder: Path, name: str, mode: str, rows: int) -> Any:
    """Prepare a process, which loads the global batch and uses its own rows."""
    job = rx.initialize(verbose=False)
    keep_freed_memory()
    with np.load(folder / f"{name}-batch.npz") as file:
        size = rows * job.processes
        data = {key: file[key][:size] for key in file}
    loss, optimizer = (gpt_loss, OPTIMIZER) if name == "gpt" else (lenet_loss, optax.sgd(**SGD))
    dp = rx.DataParallel(loss, optimizer, mode=mode, job=job)
    state = dp.init(start(name))
    (batch,) = dp.feed(data, size)
    step = inspect(dp.lower(state, batch).compile())
    gradient = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))

    def steps(count: int) -> dict[str, Any]:
        nonlocal state
        losses = []
        state, _ = jax.block_until_ready(dp.step(state, batch))  # synchronizes the processes
        started = time.perf_counter()
        for _ in range(count):
            state, metrics = dp.step(state, batch)
            losses.append(metrics["loss"])
        jax.block_until_ready(state)
        seconds = (time.perf_counter() - started) / count
        return {"seconds": seconds, "losses": [float(loss) for loss in losses]}

    about = {
        "bytes": sum(each.bytes for each in step.collectives),
        "reductions": sum(each.count for each in step.collectives),
        "gradient": gradient,
    }
    return about, steps


def main() -> None:
    folder, name, mode, rows, *_ = sys.argv[1:]
    serve(partial(prepare, Path(folder), name, mode, int(rows)))


if __name__ == "__main__":
    main()

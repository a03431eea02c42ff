"""Trains the cases below; process 0 writes the results.

Imported, it gives the same results on the devices at hand.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from support import counted_metrics

import replicax as rx
from replicax.analysis.hlo import instructions
from replicax.core.ground.job import Job
from replicax.train.files.fingerprint import sha256

ROWS, FEATURES, STEPS_OF_AN_EPOCH = 51, 6, 4
BATCH = 16
UNEVEN = ([8, 8, 8, 5], [8, 3])
"""Rows of each batch that a process's own loader gives: process 0's, process 1's."""

_random = np.random.default_rng(5)
DATA = {
    "x": _random.normal(size=(ROWS, FEATURES)).astype(np.float32),
    "y": _random.normal(size=ROWS).astype(np.float32),
    "weight": _random.uniform(0.1, 10, ROWS).astype(np.float32),
}
Results = dict[str, dict[str, Any]]


def loss(model: Any, batch: Any, key: Any) -> Any:
    """A weighted regression whose rows count differently."""
    out = jnp.tanh(batch["x"] @ model["in"]) @ model["out"]
    return rx.Weighted((out - batch["y"]) ** 2, batch["weight"]), {"size": jnp.abs(out)}


def model() -> dict[str, Any]:
    """Two layers."""
    random = np.random.default_rng(6)
    return {
        "in": random.normal(size=(FEATURES, 16)).astype(np.float32),
        "out": random.normal(size=16).astype(np.float32),
    }


def train(source: Any, mesh: Any = None, **options: Any) -> dict[str, Any]:
    """Two epochs: weights, the last loss, and the evaluation."""
    dp = rx.DataParallel(loss, optax.adamw(1e-2), mesh=mesh, **options)
    state = dp.init(model())
    rows = []
    for epoch in range(2):
        for batch in dp.feed(source, BATCH, shuffle=source is DATA, seed=3, epoch=epoch):
            state, metrics = dp.step(state, batch)
            rows.append(batch.rows)
    evaluated = dp.evaluate(state, dp.feed(source, BATCH))
    gathered = jax.jit(lambda tree: tree, out_shardings=_everywhere(dp))(state.params)
    weights = {name: np.asarray(leaf).tolist() for name, leaf in gathered.items()}
    last = {name: float(value) for name, value in metrics.items()}
    known = dp.feed(source, BATCH)
    told = {"rows": known.source.rows, "padding": known.padding}
    return {"weights": weights, "last": last, "evaluated": evaluated, "rows": rows, "told": told}


def train_network(mesh: Any = None, job: Job | None = None) -> list[float]:
    """Return the weights of an NNX network with Dropout and its random keys, after an epoch."""

    def network_loss(network: Any, batch: Any, key: Any) -> Any:
        return (network(batch["x"])[:, 0] - batch["y"]) ** 2

    dp = rx.DataParallel(network_loss, optax.adamw(1e-2), mesh=mesh, mode="exact", job=job)
    rngs = nnx.Rngs(0)
    layers = [nnx.Linear(FEATURES, 16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs), nnx.relu]
    state = dp.init(nnx.Sequential(*layers, nnx.Linear(16, 1, rngs=rngs)))
    for batch in dp.feed(DATA, BATCH):
        state, _ = dp.step(state, batch)
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.params)]).tolist()


def _everywhere(dp: rx.DataParallel) -> Any:
    return jax.sharding.NamedSharding(dp.mesh, jax.sharding.PartitionSpec())


class Rows:
    """Rows as a Grain source."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> dict[str, np.ndarray]:
        return {name: leaf[number] for name, leaf in DATA.items()}


def own_batches(process: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the batches that process `process` reads."""
    first = sum(UNEVEN[0]) * process
    for rows in UNEVEN[process]:
        yield {name: leaf[first : first + rows] for name, leaf in DATA.items()}
        first += rows


class Own:
    """A loader that can be iterated again."""

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return own_batches(jax.process_index())


def joined_batches() -> list[dict[str, np.ndarray]]:
    """Return the batches of both processes, joined for one process."""
    parts: list[list[dict[str, np.ndarray]]] = [list(own_batches(process)) for process in (0, 1)]
    joined = []
    for number in range(max(map(len, parts))):
        here = [part[number] for part in parts if number < len(part)]
        joined.append({name: np.concatenate([p[name] for p in here]) for name in DATA})
    return joined


def own_arrays() -> dict[str, np.ndarray]:
    """Return the rows that this process has in memory: 35 or 16."""
    cut = slice(0, 35) if jax.process_index() == 0 else slice(35, None)
    return {name: leaf[cut] for name, leaf in DATA.items()}


CASES: dict[str, Callable[[Job], dict[str, Any]]] = {
    "jit": lambda job: train(DATA, job=job),
    "shard_map": lambda job: train(DATA, mode="shard_map", job=job),
    "micro-batches": lambda job: train(DATA, accumulate=3, job=job),
    "micro-batches, shard_map": lambda job: train(DATA, accumulate=3, mode="shard_map", job=job),
    "exact": lambda job: train(DATA, mode="exact", job=job),
    "zero1": lambda job: train(DATA, layout="zero1", job=job),
    "fsdp": lambda job: train(DATA, layout="fsdp", job=job),
    "grain": lambda job: train(grain.MapDataset.source(Rows()), job=job),
    "uneven loaders": lambda job: train(rx.ProcessLocal(Own()), job=job),
    "uneven loaders, shard_map": lambda job: train(
        rx.ProcessLocal(Own()), mode="shard_map", job=job
    ),
    "own arrays": lambda job: train(rx.ProcessLocal(own_arrays()), job=job),
}


def reductions(job: Job) -> list[str]:
    """Return the shape of each reduction in a step of mode `shard_map`."""
    dp = rx.DataParallel(loss, optax.adamw(1e-2), mode="shard_map", job=job)
    compiled = dp.lower(model(), {name: leaf[:BATCH] for name, leaf in DATA.items()}).compile()
    return [
        each.shape for each in instructions(compiled.as_text()) if each.opcode.startswith("all-")
    ]


def predict(mesh: Any = None, job: Job | None = None) -> dict[str, Any]:
    """Predict rows in one memory, and in that of each process."""

    def predicted(model: Any, batch: Any, key: Any) -> Any:
        out = jnp.tanh(batch["x"] @ model["in"]) @ model["out"]
        return {"out": out, "half": batch["x"].astype(jnp.bfloat16)}

    dp = rx.DataParallel(loss, optax.sgd(0.1), mesh=mesh, mode="shard_map", job=job)
    state = dp.init(model())
    sources = {"arrays": DATA}
    if job is not None:
        sources["own arrays"] = rx.ProcessLocal(own_arrays())
    found = {
        name: dp.predict(state, dp.feed(each, BATCH), predicted) for name, each in sources.items()
    }
    dp.job.agree("the predictions", {"sha256": sha256(found)})
    return jax.tree.map(lambda leaf: leaf.astype(np.float32).tolist(), found)


def custom_step(mesh: Any = None, job: Job | None = None) -> dict[str, Any]:
    """Train an epoch with a custom step; returns its state and metrics."""
    optimizer = optax.adam(1e-2)

    def step(state: Any, batch: Any, key: Any) -> Any:
        means, gradient = rx.value_and_grad(loss)(state["model"], batch, key)
        updates, moments = optimizer.update(gradient, state["moments"])
        x, real = rx.gather((batch["x"], rx.row_weights(batch["x"])))
        after = {
            "model": optax.apply_updates(state["model"], updates),
            "moments": moments,
            "center": jnp.sum(x * real[:, None], 0) / jnp.sum(real),
        }
        return after, {**means, "mean": rx.mean(batch["y"])}

    dp = rx.DataParallel(step=step, mesh=mesh, mode="shard_map", job=job)
    begin = {"model": model(), "moments": optimizer.init(model()), "center": jnp.zeros(FEATURES)}
    state, told = dp.init(begin), []
    for batch in dp.feed(DATA, BATCH):
        state, metrics = dp.step(state, batch)
        told.append({name: float(value) for name, value in metrics.items()})
    return {
        "state": jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), state.params),
        "told": told,
    }


def merged(mesh: Any = None, job: Job | None = None) -> dict[str, Any]:
    """Return metrics that are no means: of an evaluation, and of a step with padding."""
    dp = rx.DataParallel(
        counted_metrics.loss, optax.sgd(0.0), mesh=mesh, mode="shard_map", accumulate=2, job=job
    )
    state = dp.init(counted_metrics.MODEL)
    found = dp.evaluate(state, dp.feed(counted_metrics.rows(), 32))
    [batch] = dp.feed(counted_metrics.rows(), 96)
    _, metrics = dp.step(state, batch)
    return {"evaluated": found, "step": counted_metrics.values(metrics)}


MORE: dict[str, Callable[[Job], Any]] = {
    "reductions": reductions,
    "network": lambda job: train_network(job=job),
    "predictions": lambda job: predict(job=job),
    "custom step": lambda job: custom_step(job=job),
    "merged": lambda job: merged(job=job),
}


def main(path: str, *names: str) -> None:
    """Run as one process of a job."""
    job = rx.initialize(verbose=False)
    results = {name: (CASES | MORE)[name](job) for name in names}
    if jax.process_index() == 0:
        Path(path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

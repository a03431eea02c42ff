"""The training of a trial with rounds, as one island, in `FOLDER/run`.

CHAOS_ROUNDS has the arguments of `rx.Rounds` as JSON, and CHAOS_SEED another seed of the weights
and the order of rows, to measure how much the loss differs without faults. See `job.py`.
"""

import json
import os
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from chaos.islands.job import fit, main
from chaos.islands.sizes import MICRO_SHARDS, ROWS
from chaos.jobs import Notes

import replicax as rx
from replicax.train.files.fingerprint import sha256
from replicax.train.files.records import Record

FEATURES = 8


def loss(model: Any, batch: Any, key: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ model["in"])
    return (hidden @ model["out"] - batch["y"]) ** 2


def model(seed: int) -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(seed)
    return {
        "in": 0.5 * numbers.normal(size=(FEATURES, 32)).astype(np.float32),
        "out": 0.3 * numbers.normal(size=32).astype(np.float32),
    }


def rows(count: int, seed: int) -> dict[str, np.ndarray]:
    """Return rows that a model can learn; the rest of the loss is noise of variance 0.01."""
    numbers = np.random.default_rng(seed)
    x = numbers.normal(size=(count, FEATURES)).astype(np.float32)
    y = np.tanh(x[:, 0] - x[:, 1]) + 0.1 * numbers.normal(size=count)
    return {"x": x, "y": y.astype(np.float32)}


def train(notes: Notes) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "0"))
    rounds: dict[str, Any] = json.loads(os.environ["CHAOS_ROUNDS"])
    dp = rx.DataParallel(
        loss,
        optax.adamw(1e-2),
        mode="jit",
        micro_shards=MICRO_SHARDS,
        job=rx.initialize(verbose=False),
        rounds=rx.Rounds(**rounds, outer=optax.sgd(0.8, 0.5, nesterov=True)),
    )
    state = dp.init(model(seed), seed=3)
    result = fit(dp, state, rows(ROWS, seed=2), rows(ROWS, seed=5), notes, seed)
    state = result.state
    notes.write(
        "result",
        agreed=sha256((state.params, state.opt_state, state.extras, state.step)),
        records=[(r.kind, r.step, agreed(r)) for r in result.records if alike(r.kind)],
        step=int(state.step),
        loss=[r.metrics["loss"] for r in result.records if r.kind == "eval"][-1],
    )


def alike(kind: str) -> bool:
    """Whether all islands have the same records of a kind."""
    return kind in ("train", "eval")


def agreed(record: Record) -> dict[str, float]:
    """Return the metrics that do not depend on the island: of steps, the loss of rounds."""
    metrics, whole = record.metrics, record.kind == "eval"
    return {name: metrics[name] for name in metrics if whole or name == "round_loss"}


if __name__ == "__main__":
    main(train)

"""Measure what the check of rows adds to the first step: time of the check, and of the rest.

    python benchmarks/row_cost.py --rounds 5

Each round builds a new `DataParallel` and times the check and the rest of the first step (tracing,
compilation and the step itself), with the compilation cache off. Writes `results/row_cost.json`.
"""

import argparse
import os
import time
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "2")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import environment, save, spread

import replicax as rx
from replicax.core.call_checks import STEP
from replicax.recipes.cnn import CNN
from replicax.recipes.gpt2 import GPT2
from replicax.recipes.lenet import LeNet
from replicax.recipes.mlp import MLP


def three_losses() -> tuple[dict[str, Any], Any, Any]:
    """Return a custom step with three losses, its state, and a batch."""

    def apply(model: Any, x: Any) -> Any:
        for n in range(3):
            x = jnp.tanh(x @ model[f"w{n}"])
        return x

    def part(name: str) -> Any:
        def loss(model: Any, batch: Any, key: Any) -> Any:
            return jnp.sum((apply(model, batch["x"]) - batch[name]) ** 2, 1)

        return loss

    optimizer = optax.adam(1e-3)

    def step(state: Any, batch: Any, key: Any) -> Any:
        metrics = {}
        for name in ("a", "b", "c"):
            means, gradient = rx.value_and_grad(part(name))(state["model"], batch, key)
            updates, moments = optimizer.update(gradient, state["moments"], state["model"])
            model = optax.apply_updates(state["model"], updates)
            state = {"model": model, "moments": moments}
            metrics[name] = means["loss"]
        return state, {"loss": metrics["a"], **metrics}

    random = np.random.default_rng(0)
    model = {f"w{n}": random.normal(size=(32, 32)).astype(np.float32) for n in range(3)}
    data = {name: random.normal(size=(64, 32)).astype(np.float32) for name in ("x", "a", "b", "c")}
    return {"step": step}, {"model": model, "moments": optimizer.init(model)}, data


def of_recipe(recipe: Any, rows: int) -> tuple[dict[str, Any], Any, Any]:
    source = recipe.train_source()
    data = jax.tree.map(lambda leaf: np.asarray(leaf[:rows]), source)
    model = recipe.model(jax.random.key(0))
    return {"loss": recipe.loss, "optimizer": recipe.optimizer()}, model, data


def of_rows(loss: Any) -> tuple[dict[str, Any], Any, Any]:
    data = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
    return {"loss": loss, "optimizer": optax.adam(1e-3)}, {"w": jnp.eye(64)}, {"x": data}


def mean(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jnp.tanh(batch["x"] @ model["w"]) - batch["x"]) ** 2)


def flipped(model: Any, batch: Any, key: Any) -> Any:
    """Rows stay apart, but the traces do not show it."""
    return jnp.sum(jnp.tanh(batch["x"][::-1] @ model["w"])[::-1] ** 2, 1)


def contrastive(model: Any, batch: Any, key: Any) -> Any:
    found = batch["x"] @ model["w"]
    return -jnp.diagonal(jax.nn.log_softmax(found @ found.T, axis=1))


SUBJECTS = {
    "lenet, 64 rows": lambda: of_recipe(LeNet(), 64),
    "mlp, 64 rows": lambda: of_recipe(MLP(), 64),
    "cnn with BatchNorm, 64 rows": lambda: of_recipe(CNN(), 64),
    "gpt2 nano, 32 rows": lambda: of_recipe(GPT2(**GPT2.presets["nano"]), 32),
    "a scalar mean, 256 rows": lambda: of_rows(mean),
    "a custom step with three losses, 64 rows": three_losses,
    "computed: rows flipped and back, 256 rows": lambda: of_rows(flipped),
    "computed, then an error: a contrastive loss, 256 rows": lambda: of_rows(contrastive),
}


def measured(subject: Any, rounds: int) -> dict[str, Any]:
    """Return the seconds of the check and of the rest of the first step, and their ratio."""
    checks, rests = [], []
    for _ in range(rounds + 1):
        jax.clear_caches()
        settings, model, data = subject()
        mesh = rx.make_mesh(devices=jax.devices()[:2])
        dp = rx.DataParallel(**settings, mode="shard_map", mesh=mesh)
        state = dp.init(model)
        batch = jax.block_until_ready(dp.program(model).batches.placed(data))
        jax.block_until_ready(state)
        started = time.perf_counter()
        try:
            dp._checks.check(STEP, dp._known.step, state, batch)
        except rx.errors.LossError:
            checks.append(time.perf_counter() - started)
            continue
        checks.append(time.perf_counter() - started)
        started = time.perf_counter()
        jax.block_until_ready(dp.step(state, batch))
        rests.append(time.perf_counter() - started)
    found = {"check": spread(checks[1:])}
    if rests:
        shares = [check / rest for check, rest in zip(checks[1:], rests[1:], strict=True)]
        found |= {"rest of the first step": spread(rests[1:]), "share": spread(shares)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    result = {}
    for name, subject in SUBJECTS.items():
        result[name] = measured(subject, rounds)
        print(name, result[name], flush=True)
    print(save("row_cost", {"seconds": result, "rounds": rounds, **environment()}))


if __name__ == "__main__":
    main()

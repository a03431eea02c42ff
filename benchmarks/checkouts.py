"""Compare two checkouts: `import replicax`, the first step, and the host's work of a step.

    python benchmarks/checkouts.py BEFORE --rounds 15

`BEFORE` is the folder of another checkout; this one is "after". Each round runs both, in fresh
processes and in turn: milliseconds of the import beyond `import jax, optax`, of the first step of a
layered MLP with its compilation, and of a step of two parameters in mode `jit`; of later steps of
recipes, of 64 rows (GPT-2 `nano`: 8), on one device in `jit` and on two in `shard_map`.
Writes `results/checkouts.json`.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from timing import environment, ratios, save, spread

HERE = Path(__file__).resolve().parents[1]
PROGRAM = """
import json, time
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_num_cpu_devices", 2)
began = time.perf_counter()
import replicax as rx
imported = time.perf_counter() - began
from replicax.recipes.recipe import find_recipe

def loss(model, batch, key):
    x = batch["x"]
    for weights in model["layers"]:
        x = jnp.tanh(x @ weights)
    return (x[:, 0] + model["b"] - batch["y"]) ** 2

def steps(model, width, count):
    dp = rx.DataParallel(loss, optax.adam(1e-3), mesh=rx.make_mesh(devices=jax.devices()[:1]))
    rows = {"x": np.ones((8, width), np.float32), "y": np.ones(8, np.float32)}
    return timed(dp, model, rows, 8, count)

def of_recipe(name, rows, count, fields, **settings):
    recipe = find_recipe(name)(**fields)
    dp = rx.DataParallel(recipe.loss, recipe.optimizer(), **settings)
    return timed(dp, recipe.model(jax.random.key(0)), recipe.train_source(), rows, count)[1]

def timed(dp, model, rows, size, count):
    state = dp.init(model)
    batch = next(iter(dp.feed(rows, batch_size=size)))
    began = time.perf_counter()
    state, metrics = dp.step(state, batch)
    jax.block_until_ready(metrics)
    first, took = time.perf_counter() - began, []
    for _ in range(count):
        began = time.perf_counter()
        state, metrics = dp.step(state, batch)
        jax.block_until_ready(metrics)
        took.append(time.perf_counter() - began)
    return first, float(np.median(took)) if took else 0.0

first, _ = steps({"layers": [jnp.eye(64)] * 8, "b": jnp.zeros(())}, 64, 0)
_, step = steps({"layers": [], "b": jnp.zeros(())}, 1, 3000)
seconds = {"import": imported, "first_step": first, "step": step}
ONE, TWO = (rx.make_mesh(devices=jax.devices()[:n]) for n in (1, 2))
NANO = find_recipe("gpt2").presets["nano"]
CASES = {"mlp": (64, 400, {}), "lenet": (64, 60, {}), "cnn": (64, 12, {}), "gpt2": (8, 12, NANO)}
for name, case in CASES.items():
    seconds[name] = of_recipe(name, *case, mesh=ONE)
    seconds[f"{name}_on_2"] = of_recipe(name, *case, mesh=TWO, mode="shard_map")
print(json.dumps({f"{name}_ms": 1e3 * each for name, each in seconds.items()}))
"""


def measured(checkout: Path) -> dict[str, float]:
    env = {**os.environ, "PYTHONPATH": str(checkout / "src"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    checkouts = {"before": options.before, "after": HERE}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds + 1):  # the first fills the caches
        taken = {name: measured(path) for name, path in checkouts.items()}
        if number:
            rounds.append(taken)
    results: dict[str, object] = {**environment(), "rounds": options.rounds}
    for figure in rounds[0]["before"]:
        before, after = ([each[name][figure] for each in rounds] for name in checkouts)
        results[figure] = {
            "before": spread(before),
            "after": spread(after),
            "ratio": spread(ratios(after, before)),
        }
        print(figure, results[figure])
    save("checkouts", results)


if __name__ == "__main__":
    main()

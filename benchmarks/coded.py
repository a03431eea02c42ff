"""The evaluation loss after training with gradients sent in 8 or 4 bits, compared with float32.

Goals, on 4 replicas and as a mean over 3 seeds: at most 0.5% more with `int8`, 1% with `int4`. A
seed is the same initial parameters, batches and random numbers for every reduction. Learning rates
decay to 0, as otherwise the noise of the last steps is larger than what is to be found. Rows that
the result file has are not run again.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from timing import RESULTS, environment, save

import replicax as rx
from replicax.recipes.cnn import CNN
from replicax.recipes.gpt2 import GPT2
from replicax.recipes.lenet import LeNet

REPLICAS = 4
SEEDS = 0, 1, 2
GOALS = {"int8": 0.5, "int4": 1.0}
"""Percent above the loss of float32."""
REDUCTIONS = "float32", *GOALS


@dataclasses.dataclass(frozen=True)
class Task:
    """A recipe, its optimizer for a number of steps, and the rows that are evaluated."""

    recipe: Any
    steps: int
    optimizer: optax.GradientTransformation
    held_out: int = 10_000


def decayed(peak: float, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps)


def tasks(data_dir: Path | None, share: float) -> dict[str, Callable[[], Task]]:
    """Return the recipes with their optimizers, and other schedules, for a share of the steps."""

    def gpt() -> Task:
        recipe, steps = GPT2(batch_size=8), int(300 * share)
        rate = decayed(recipe.learning_rate, steps)
        adam = optax.adamw(rate, b2=0.95, weight_decay=recipe.weight_decay)
        clip = optax.clip_by_global_norm(recipe.clip_norm)
        return Task(recipe, steps, optax.chain(clip, adam), held_out=512)

    def lenet() -> Task:
        recipe, steps = LeNet(data_dir=data_dir), int(300 * share)
        rate = decayed(recipe.learning_rate, steps)
        descent = optax.sgd(rate, momentum=recipe.momentum, nesterov=True)
        clip = optax.clip_by_global_norm(recipe.clip_norm)
        return Task(recipe, steps, optax.chain(clip, descent))

    def cnn() -> Task:
        recipe, steps = CNN(data_dir=data_dir, batch_size=128), int(200 * share)
        adam = optax.adam(decayed(recipe.learning_rate, steps))
        return Task(recipe, steps, adam)

    found = {"gpt nano": gpt, "lenet": lenet, "nnx cnn": cnn}
    return {name: functools.cache(make) for name, make in found.items()}


@functools.cache
def data_parallel(task: Task, reduction: str) -> rx.DataParallel:
    """Return the step of a task, once for all seeds."""
    mesh = rx.make_mesh(devices=jax.devices()[:REPLICAS])
    return rx.DataParallel(
        task.recipe.loss, task.optimizer, mesh=mesh, mode="shard_map", reduction=reduction
    )


def batches(dp: rx.DataParallel, task: Task, seed: int) -> Iterator[Any]:
    """Yield a task's batches, epoch after epoch."""
    source = task.recipe.train_source()
    epochs = (
        dp.feed(source, task.recipe.batch_size, shuffle=True, seed=seed, epoch=epoch)
        for epoch in itertools.count()
    )
    return itertools.islice(itertools.chain.from_iterable(epochs), task.steps)


def trained(task: Task, reduction: str, seed: int) -> dict[str, float]:
    """Return the evaluation loss after training, and the loss of the last batches."""
    dp, losses = data_parallel(task, reduction), []
    state = dp.init(task.recipe.model(jax.random.key(seed)), seed=seed)
    for batch in batches(dp, task, seed):
        state, metrics = dp.step(state, batch)
        losses.append(metrics["loss"])
    held_out = jax.tree.map(lambda leaf: leaf[: task.held_out], task.recipe.eval_source())
    found = dp.evaluate(state, dp.feed(held_out, task.recipe.batch_size))
    last = [float(loss) for loss in losses[-20:]]
    return {"loss": float(found["loss"]), "last_train_loss": float(np.mean(last))}


def relative(rows: list[dict[str, Any]], model: str, reduction: str) -> list[float]:
    """Return by how many percent the loss is above that of float32, by seed."""
    by_key = {(row["model"], row["reduction"], row["seed"]): row["loss"] for row in rows}
    pairs = [
        (by_key.get((model, reduction, seed)), by_key.get((model, "float32", seed)))
        for seed in SEEDS
    ]
    return [100 * (one / other - 1) for one, other in pairs if one and other]


def summary(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield a line for each model and reduction."""
    for model in dict.fromkeys(row["model"] for row in rows):
        for reduction in dict.fromkeys(row["reduction"] for row in rows):
            losses = [
                row["loss"]
                for row in rows
                if (row["model"], row["reduction"]) == (model, reduction)
            ]
            above = relative(rows, model, reduction)
            if not losses or not above:
                continue
            yield {
                "model": model,
                "reduction": reduction,
                "mean_loss": float(np.mean(losses)),
                "percent_above_float32": [round(each, 3) for each in above],
                "mean_percent": round(float(np.mean(above)), 3),
                "goal_percent": GOALS.get(reduction),
            }


def shown(lines: list[dict[str, Any]]) -> None:
    print(f"\n{'model':<10} {'reduction':<10} {'loss':>8}  above float32, by seed, mean and goal")
    for line in lines:
        each = " ".join(f"{value:+7.2f}%" for value in line["percent_above_float32"])
        goal = line["goal_percent"]
        told = "" if goal is None else f" {line['mean_percent']:+7.2f}%  {goal}%"
        print(
            f"{line['model']:<10} {line['reduction']:<10} {line['mean_loss']:>8.4f}  {each}{told}"
        )


def known_rows(path: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of an earlier run with the same settings."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["settings"] != settings:
        raise SystemExit(f"{path} has other settings, {result['settings']}: remove it first")
    rows: list[dict[str, Any]] = result["rows"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, help="folder of Fashion-MNIST")
    parser.add_argument("--share", type=float, default=1.0, help="of the steps (default: 1)")
    parser.add_argument("--name", default="coded", help="of the result file")
    parser.add_argument("--control", action="store_true", help="train with bfloat16, too")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    settings = {"replicas": REPLICAS, "share": args.share}
    rows = known_rows(RESULTS / f"{args.name}.json", settings)
    done = {(row["model"], row["reduction"], row["seed"]) for row in rows}
    reductions = (*REDUCTIONS, "bfloat16") if args.control else REDUCTIONS
    for seed in SEEDS:
        for model, make in tasks(args.data_dir, args.share).items():
            for reduction in reductions:
                if (model, reduction, seed) in done:
                    continue
                started = time.perf_counter()
                found = trained(make(), reduction, seed)
                key = {"model": model, "reduction": reduction, "seed": seed}
                seconds = round(time.perf_counter() - started, 1)
                rows.append({**key, "steps": make().steps, **found, "seconds": seconds})
                print(*key.values(), f"loss {found['loss']:.5f}", f"{seconds} s", flush=True)
                result = {"settings": settings, "environment": environment(), "rows": rows}
                save(args.name, {**result, "summary": list(summary(rows))})
    shown(list(summary(rows)))


if __name__ == "__main__":
    main()

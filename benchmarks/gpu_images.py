"""Milliseconds per step of LeNet and the CNN with BatchNorm, for small and large batches."""

import argparse
import statistics
from typing import Any

import jax
import numpy as np
import optax
from gpu_part import answer, options, seconds_a_step

import replicax as rx
from replicax.errors import MissingDependencyError
from replicax.recipes.lenet import LeNet


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    recipes: dict[str, Any] = {"LeNet": LeNet()}
    try:
        from replicax.recipes.cnn import CNN

        recipes["CNN"] = CNN()
    except MissingDependencyError as missing:
        found["CNN"] = f"skipped: {missing}"
    for name, recipe in recipes.items():
        for rows in (16,) if args.tiny else (256, 4096):
            for precision in ("float32", "bfloat16"):
                seconds = step_seconds(recipe, rows, precision, 3 if args.tiny else 100)
                found[f"{name}, {rows} rows, {precision}, ms"] = round(1e3 * seconds, 4)
    return found


def step_seconds(recipe: Any, rows: int, precision: str, count: int) -> float:
    """Return the median over rounds of `count` steps."""
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    optimizer = optax.sgd(0.01, momentum=0.9)
    dp = rx.DataParallel(recipe.loss, optimizer, mesh=mesh, mode="single", precision=precision)
    state = dp.init(recipe.model(jax.random.key(0)))
    random = np.random.default_rng(0)
    data = {
        "image": random.integers(0, 256, (rows, 28, 28, 1)).astype(np.uint8),
        "label": random.integers(0, 10, rows).astype(np.int32),
    }
    (batch,) = dp.feed(data, rows)

    def steps(number: int) -> None:
        nonlocal state
        for _ in range(number):
            state, _ = dp.step(state, batch)
        jax.block_until_ready(state)

    return statistics.median(seconds_a_step(steps, count, rounds=5))


if __name__ == "__main__":
    answer(measure, options(__doc__))

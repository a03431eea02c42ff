"""Milliseconds per step of LeNet or the CNN with BatchNorm, for small and large batches."""

import argparse
import statistics
from typing import Any

import jax
import numpy as np
import optax
from gpu_part import LeftOutError, answer, options, seconds_a_step

import replicax as rx
from replicax.errors import MissingDependencyError
from replicax.recipes.lenet import LeNet


def measure(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    recipe: Any = LeNet()
    if args.model == "cnn":
        try:
            from replicax.recipes.cnn import CNN
        except MissingDependencyError as missing:
            raise LeftOutError(str(missing)) from missing
        recipe = CNN()
    for rows in (16,) if args.tiny else (256, 4096):
        for precision in ("float32", "bfloat16"):
            seconds = step_seconds(recipe, rows, precision, 3 if args.tiny else 100)
            found[f"{rows} rows, {precision}, ms"] = round(1e3 * seconds, 4)
    return found


def made_up_images(rows: int) -> dict[str, np.ndarray]:
    """Return random images of the size of Fashion-MNIST's, and labels."""
    random = np.random.default_rng(0)
    return {
        "image": random.integers(0, 256, (rows, 28, 28, 1)).astype(np.uint8),
        "label": random.integers(0, 10, rows).astype(np.int32),
    }


def step_seconds(recipe: Any, rows: int, precision: str, count: int) -> float:
    """Return the median over rounds of `count` steps."""
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    optimizer = optax.sgd(0.01, momentum=0.9)
    dp = rx.DataParallel(recipe.loss, optimizer, mesh=mesh, mode="single", precision=precision)
    state = dp.init(recipe.model(jax.random.key(0)))
    (batch,) = dp.feed(made_up_images(rows), rows)

    def steps(number: int) -> None:
        nonlocal state
        for _ in range(number):
            state, _ = dp.step(state, batch)
        jax.block_until_ready(state)

    return statistics.median(seconds_a_step(steps, count, rounds=5))


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--model", choices=["lenet", "cnn"], default="lenet")
    answer(measure, parser)

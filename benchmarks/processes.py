"""Weak scaling from one process to two, with one core each: Replicax and PyTorch DDP over Gloo.

A GPT (the recipe's `nano`) and LeNet, with the same parameters, rows and optimizer in all, whose
first losses must agree. The batch is fixed, so input is not measured. All processes are started
once and warmed up; each round runs all of them in random order. `apart` is two independent
processes at the same time, an upper bound for cores with shared memory.
"""

import argparse
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from gpt import BETAS, LEARNING_RATE, WEIGHT_DECAY
from process_group import Group
from processes_replicax import SGD, SHAPE, start
from timing import environment, ratios, save, spread
from torch_peer import torch_version

from replicax.bench.machine import Neighbours, own_cores
from replicax.bench.numbers import around
from replicax.recipes.transformer import published

COUNTS = 1, 2
HOW = {
    "replicax jit": ("processes_replicax.py", "jit"),
    "replicax shard_map": ("processes_replicax.py", "shard_map"),
    "torch eager": ("processes_torch.py", "eager"),
    "torch compile": ("processes_torch.py", "compile"),
}
STEPS_COMPARED = 4
TOLERANCE = 1e-3
"""Largest difference in a loss, in nats, in the first steps."""

APART = 0
"""Used as a count: two independent processes."""

Key = tuple[str, int]
"""Contender and number of processes."""


def main() -> None:
    args = arguments()
    cores = own_cores()[: max(COUNTS)]
    if len(cores) < max(COUNTS):
        raise SystemExit(f"{len(cores)} cores; {max(COUNTS)} processes need one each")
    where = {**environment(), "torch": torch_version(args.python)}
    models, neighbours = {}, Neighbours()
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), {"gpt": args.gpt_rows, "lenet": args.lenet_rows})
        for name, rows in (("gpt", args.gpt_rows), ("lenet", args.lenet_rows)):
            if name in args.models:
                models[name] = measure(name, rows, Path(folder), cores, args)
                show(name, rows, models[name])
    where["other_processes_used_cores"] = neighbours.cores()
    if (where["other_processes_used_cores"] or 0) > 0.1:
        print(f"other processes used {where['other_processes_used_cores']:.1f} cores")
    settings = {name: value for name, value in vars(args).items() if name != "python"}
    print(f"see {save('processes', {'environment': where, 'settings': settings, **models})}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["gpt", "lenet"])
    parser.add_argument("--gpt-rows", type=int, default=16, help="per process (default: 16)")
    parser.add_argument("--lenet-rows", type=int, default=128, help="per process (default: 128)")
    parser.add_argument("--rounds", type=int, default=11, help="default: 11")
    parser.add_argument("--seconds", type=float, default=0.5, help="per run (default: 0.5)")
    args = parser.parse_args()
    args.python = sys.executable
    return args


def write_inputs(folder: Path, rows: dict[str, int]) -> None:
    """Write the batches, and PyTorch's initial parameters and settings."""
    drawn = np.random.default_rng(0)
    tokens = (max(COUNTS) * rows["gpt"], SHAPE.context + 1)
    images = (max(COUNTS) * rows["lenet"], 28, 28, 1)
    np.savez(
        folder / "gpt-batch.npz",
        tokens=drawn.integers(0, SHAPE.vocab_size, tokens).astype(np.int32),
    )
    np.savez(
        folder / "lenet-batch.npz",
        image=drawn.integers(0, 256, images).astype(np.uint8),
        label=drawn.integers(0, 10, images[0]).astype(np.int32),
    )
    np.savez(folder / "gpt-start.npz", **published(start("gpt")))
    np.savez(folder / "lenet-start.npz", **for_torch(start("lenet")))
    settings = {
        "shape": dataclasses.asdict(SHAPE),
        "adamw": {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY},
        "sgd": {"lr": SGD["learning_rate"], "momentum": SGD["momentum"]},
    }
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")


def for_torch(params: Any) -> dict[str, np.ndarray]:
    """Return LeNet's parameters under the layer names of `lenet_torch.lenet`."""
    layers = dict(zip(("conv1", "conv2", "dense1", "dense2"), (0, 3, 7, 9), strict=True))
    arrays = {}
    for name, place in layers.items():
        kernel = np.asarray(params[name]["kernel"])
        arrays[f"{place}.weight"] = kernel.transpose(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T
        arrays[f"{place}.bias"] = np.asarray(params[name]["bias"])
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def measure(
    name: str, rows: int, folder: Path, cores: list[int], args: argparse.Namespace
) -> dict[str, Any]:
    """Measure every contender on every count, in rounds."""
    with contextlib.ExitStack() as stack:
        groups: dict[Key, Group] = {}
        others: dict[str, Group] = {}
        for how, (script, form) in HOW.items():
            for count in COUNTS:
                group = Group(script, [str(folder), name, form, str(rows)], count, cores)
                stack.callback(group.close)
                groups[how, count] = group
            others[how] = Group(script, [str(folder), name, form, str(rows)], 1, cores[1:])
            stack.callback(others[how].close)
        print(f"{name}: {len(groups) + len(others)} jobs starting and compiling", flush=True)
        told = {key: group.answer() for key, group in groups.items()}
        for group in others.values():
            group.answer()
        losses = {key: run(group, STEPS_COMPARED)["losses"] for key, group in groups.items()}
        check_agreement(losses)
        steps = {}
        for key, group in groups.items():
            steps[key] = max(2, round(args.seconds / run(group, STEPS_COMPARED)["seconds"]))
        seconds: dict[Key, list[float]] = {key: [] for key in [*groups, *((h, APART) for h in HOW)]}
        order = random.Random(0)
        for number in range(args.rounds):
            for how, count in order.sample(list(seconds), len(seconds)):
                alone = how, 1 if count == APART else count
                if count == APART:
                    others[how].tell(steps[alone])
                seconds[how, count].append(run(groups[alone], steps[alone])["seconds"])
                if count == APART:
                    others[how].answer()
            print(f"{name}: round {number + 1}/{args.rounds}", end="\r", flush=True)
    return {how: summary(how, rows, seconds, told, steps) for how in HOW}


def run(group: Group, steps: int) -> dict[str, Any]:
    group.tell(steps)
    return group.answer()


def check_agreement(losses: dict[Key, list[float]]) -> None:
    """Stop if a contender's losses differ from Replicax's on the same number of processes."""
    for (how, count), found in losses.items():
        expected = losses["replicax jit", count]
        if not np.allclose(found, expected, rtol=0, atol=TOLERANCE):
            raise SystemExit(
                f"{how} on {count} has losses {found}, replicax jit {expected}; they differ by "
                f"more than {TOLERANCE}: the model, batch or optimizer differs"
            )
    print(f"all agree on the first losses: {expected[0]:.4f} ... {expected[-1]:.4f}")


def summary(
    how: str,
    rows: int,
    seconds: dict[Key, list[float]],
    told: dict[Key, dict[str, Any]],
    steps: dict[Key, int],
) -> dict[str, Any]:
    """Summarize one contender; each spread is the median and the quartiles."""
    one, apart, two = (seconds[how, count] for count in (1, APART, 2))
    return {
        "seconds_per_step": {
            name: [round(value, 6) for value in values]
            for name, values in (("1", one), ("2", two), ("2 apart", apart))
        },
        "rows_per_second": {
            str(count): round(count * rows / spread(seconds[how, count])[0], 1) for count in COUNTS
        },
        "steps_per_run": {str(count): steps[how, count] for count in COUNTS},
        "efficiency": [round(value, 4) for value in spread(ratios(one, two))],
        "efficiency_apart": [round(value, 4) for value in spread(ratios(one, apart))],
        "bytes_per_step": told[how, COUNTS[-1]],
    }


def show(name: str, rows: int, table: dict[str, Any]) -> None:
    """Print one line per contender."""
    print(f"{name}, {rows} rows per process; medians, and [quartiles] or ± half their distance")
    print(f"{'':<19}{'ms, 1 process':>15}{'2 processes':>16}{'efficiency':>21}  apart  bytes/step")
    for how, row in table.items():
        times = "".join(
            f"{around([1e3 * value for value in row['seconds_per_step'][str(count)]]):>16}"
            for count in COUNTS
        )
        middle, low, high = (f"{value:.1%}" for value in row["efficiency"])
        apart = f"{row['efficiency_apart'][0]:.1%}"
        print(
            f"{how:<18}{times}{f'{middle} [{low}, {high}]':>23} {apart:>6}"
            f"{row['bytes_per_step']['bytes']:>12,}"
        )
    print()


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()

"""Compile and plan GPT-2 for NVIDIA GPUs by description: no GPU is needed, and nothing runs.

    make compilers
    PYTHONPATH=.venv/compilers python benchmarks/gpu_plans.py NAME [--only 124m]

Saves the rows under NAME in `results/gpu_plans.json`, replacing those of the same name, such as
`before` and `after` a change. Times are the planner's, with each kernel at the chip's peaks, so
real steps are not much faster (docs/plan.md lists what the plan omits).
"""

import argparse
import json
import types
from typing import Any

import jax
import numpy as np
from timing import RESULTS, environment, save

import replicax as rx
from replicax.plan.compiler import compiler_for
from replicax.plan.speed import speed, work
from replicax.plan.steps import StepCache
from replicax.plan.target import parse_target
from replicax.recipes.gpt2 import GPT2
from replicax.recipes.recipe import abstract_model
from replicax.train.guarded import guarded

CASES = (
    ("124m", "h100:1", 32, "single"),
    ("124m", "h200:1", 32, "single"),
    ("124m", "h100:8", 4, "shard_map"),
    ("124m", "h100:8", 32, "shard_map"),
    ("124m", "h100:8", 4, "jit"),
    ("124m", "h100:8", 32, "jit"),
    ("350m", "h100:1", 16, "single"),
    ("350m", "h100:8", 8, "shard_map"),
    ("774m", "h100:1", 8, "single"),
    ("1.3b", "h100:1", 8, "single"),
    ("1.5b", "h200:1", 8, "single"),
)
"""Preset, target, rows per device, mode."""


def planned(
    preset: str, aim: str, rows: int, mode: str, changes: dict[str, Any], accumulate: int = 1
) -> dict[str, Any]:
    """Return a row of the table, for `rows` per device in `accumulate` micro-batches."""
    recipe = gpt2(**{**GPT2.presets[preset], **changes})
    target = parse_target(aim)
    model = abstract_model(recipe.model, jax.random.key(0))
    mesh = rx.make_mesh(target.devices)
    dp = rx.DataParallel(
        recipe.loss,
        recipe.optimizer(),
        mesh=mesh,
        mode=mode,
        precision="bfloat16",
        accumulate=accumulate,
    )
    dp = guarded(dp, dp.abstract_state(model))
    with compiler_for(target) as (compiler, notes):
        if compiler is None:
            raise SystemExit(notes[0])
        steps = StepCache(
            model, made_up_batch(recipe, rows * target.devices), target, compiler, print
        )
        step = steps.step(dp, rows)
        if step.compilation is None:
            raise SystemExit(f"{preset} with {rows} rows does not fit {aim}")
        speeds = speed(work(steps, step), target, dp)
    found, at_rates = speeds.step, speeds.at_rates and speeds.at_rates.step.seconds
    peak = target.chip.flops_per_second["bfloat16"]
    flops = rows * recipe.context * model_flops_per_token(recipe)
    return {
        "preset": preset,
        "target": aim,
        "rows": rows,
        "mode": mode,
        "ms": round(1e3 * found.seconds, 2),
        "gb": round(step.schedule.bytes / 1e9, 1),
        "mfu": round(flops / found.seconds / peak, 3),
        "ms_at_rates": at_rates and round(1e3 * at_rates, 2),
        "mfu_at_rates": at_rates and round(flops / at_rates / peak, 3),
        "exposed_ms": round(1e3 * found.exposed_seconds, 2),
        "memory_gb": round(step.need.bytes / 1e9, 2),
        "kernels": sum(each.runs for each in step.schedule.kernels),
        "compile_seconds": round(step.compilation.seconds, 1),
        "notes": list(step.program.notes),
    }


def gpt2(**fields: Any) -> GPT2:
    """Return the recipe with these fields and synthetic text."""
    recipe = GPT2(**fields)
    size = types.SimpleNamespace(vocab_size=257)
    recipe.__dict__["_text"] = types.SimpleNamespace(tokenizer=size, train_rows=1000)
    return recipe


def made_up_batch(recipe: GPT2, rows: int) -> dict[str, np.ndarray]:
    """Return a batch of full rows, with tokens distributed like words."""
    tokens = np.random.default_rng(0).zipf(1.2, (rows, recipe.context + 1))
    return {
        "tokens": (tokens % (recipe.vocab_size or 257)).astype(np.uint16),
        "length": np.full(rows, recipe.context, np.int32),
        "bytes": np.full(rows, 4 * recipe.context, np.int32),
    }


def model_flops_per_token(recipe: GPT2) -> int:
    """Return a step's FLOPs per token, without recomputation and masked attention."""
    weights = 12 * recipe.layers * recipe.width**2 + (recipe.vocab_size or 257) * recipe.width
    return 6 * (weights + recipe.layers * recipe.context * recipe.width)


def main() -> None:
    """Plan the cases, print a line for each, and save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="name for the rows: before, unrolled, after")
    parser.add_argument("--only", default="", help="preset, target or mode must contain this")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE")
    args = parser.parse_args()
    changes = dict(each.split("=", 1) for each in args.set)
    jax.config.update("jax_num_cpu_devices", 8)
    path = RESULTS / "gpu_plans.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    rows = []
    for case in CASES:
        if args.only in " ".join(map(str, case)):
            rows.append(planned(*case, changes))
            print({name: value for name, value in rows[-1].items() if name != "notes"}, flush=True)
    result[args.name] = {"environment": environment(), "rows": rows}
    print(f"see {save('gpu_plans', result)}")


if __name__ == "__main__":
    main()

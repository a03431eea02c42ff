"""The planner's forecast of GPT-2's step for a description of the same GPU, without using it."""

import argparse
from typing import Any

import jax
from gpu_gpt import TINY
from gpu_part import LeftOutError, answer, options
from gpu_plans import planned

from replicax.analysis.hardware import chip_of_kind
from replicax.errors import ConfigError, MissingDependencyError
from replicax.plan.compilation import check_installed
from replicax.plan.compiler import DESCRIBED


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Plan the step of `rx.fit`, with the recipe's optimizer; see `gpu_plans.planned`."""
    jax.config.update("jax_platforms", "cpu")
    chip = chip_of_kind(args.device)
    name = "h100" if args.tiny else chip.name if chip else args.device
    if name not in DESCRIBED:
        raise LeftOutError(f"no description of {name} to compile for")
    try:
        check_installed("cuda")
    except (ConfigError, MissingDependencyError) as reason:
        raise LeftOutError(f"no compiler to plan with: {reason}") from reason
    size = ("nano", 8, TINY) if args.tiny else ("124m", 32, {})
    preset, rows, changes = size
    row = planned(preset, f"{name}:1", rows, "single", changes)
    return {
        "step, ms": row["ms"],
        "step at measured rates, ms": row["ms_at_rates"],
        "memory, GB": row["memory_gb"],
        "MFU at best": row["mfu"],
        "kernels": row["kernels"],
        "compiled in, s": row["compile_seconds"],
    }


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--device", default="", help="the device_kind of the GPU")
    answer(measure, parser)

"""One contender for GPT-2's step in bfloat16 on the first device: speed, memory and kernels.

Runs Replicax in one of its modes, or plain hand-written JAX (`by_hand` in gpt.py). The loss is the
recipe's; parameters, tokens and AdamW are those of gpt.py, so the first losses must agree with
those of the other contenders. The plan is read from the program that runs.
"""

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from gpt import OPTIMIZER, STEPS_COMPARED, TOLERANCES, by_hand, stepping
from gpu_part import answer, chip, last_answer, options, peak_memory_gb, seconds_a_step
from gpu_plans import gpt2, made_up_batch, model_flops_per_token
from gpu_profile import longest_kernels

import replicax as rx
from replicax.analysis.compiled import read_memory
from replicax.analysis.hardware import Chip
from replicax.analysis.rates import RATES, MeasuredRates
from replicax.analysis.roofline import kernel_roofline
from replicax.analysis.schedule import Schedule, read_schedule
from replicax.core.modes.mode_table import MODES
from replicax.recipes import transformer
from replicax.recipes.gpt2 import GPT2

PRECISION = "bfloat16"
BY_HAND = "by hand"
NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
ROWS = {"124m": 32, "1.3b": 8}
TINY = {"layers": 2, "heads": 2, "width": 64, "context": 64}


@dataclasses.dataclass(frozen=True)
class Subject:
    """The network and batch shared by all contenders."""

    recipe: GPT2
    batch: dict[str, np.ndarray]
    vocabulary: int
    """Rows of the embedding, which may exceed the number of tokens."""

    @property
    def shape(self) -> transformer.Shape:
        size = self.recipe
        return transformer.Shape(size.layers, size.heads, size.width, size.context, self.vocabulary)


def subject(args: argparse.Namespace, preset: str = "124m") -> Subject:
    """Return GPT-2 and its rows, or a tiny network and 8; `--padded` to 128s of tokens."""
    recipe = gpt2(**(TINY if args.tiny else GPT2.presets[preset]))
    vocabulary = recipe.vocab_size or 257
    padded = -(-vocabulary // 128) * 128 if args.padded else vocabulary
    return Subject(recipe, made_up_batch(recipe, 8 if args.tiny else ROWS[preset]), padded)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure losses, then times, and plan Replicax's step."""
    if args.profile:  # the profiler sees the kernels of a command buffer as one
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {NO_COMMAND_BUFFERS}"
    tuning = None
    if args.recorded and not (args.tiny or args.record):
        # In another process, as this one is to read the file, and before JAX takes the memory.
        recording = [sys.executable, *sys.argv, "--record", tempfile.mkdtemp()]
        tuning = last_answer(recording, dict(os.environ))["tuning"]
    given = subject(args, args.preset)
    if args.record:
        dp, batch = step_of(given, args.mode)
        path = dp.record_tuning(given.recipe.model(jax.random.key(0)), batch, args.record)
        return {"tuning": str(path)}
    if args.mode == BY_HAND:
        params = transformer.init(given.shape, jax.random.key(0))
        steps, plan = by_hand(given.shape, params, given.batch["tokens"], PRECISION).steps, None
    else:
        steps, plan = replicax(given, args.mode, chip(args.tiny), tuning)
    started = time.perf_counter()
    losses = steps(STEPS_COMPARED)
    first = time.perf_counter() - started
    seconds = seconds_a_step(steps, 3 if args.tiny else 10)
    found = {**figures(given, seconds, chip(args.tiny)), **compared(given, losses)}
    found |= {"first_steps_s": round(first, 1), "peak_gb": peak_memory_gb()}
    if plan:
        found |= plan.figures
    if plan and args.profile:
        found |= longest_kernels(steps, plan.kernels)
    return found


def compared(given: Subject, losses: list[float]) -> dict[str, Any]:
    """Return losses and tolerances, to check that contenders share model and optimizer."""
    return {
        "vocabulary": given.vocabulary,
        "losses": [round(loss, 5) for loss in losses],
        "tolerances": TOLERANCES[PRECISION],
    }


def figures(given: Subject, seconds: list[float], chip: Chip | None) -> dict[str, Any]:
    """Return the speed in the median round. Padding is not counted as model FLOPs."""
    rows, context = len(given.batch["tokens"]), given.recipe.context
    middle = statistics.median(seconds)
    flops = rows * context * model_flops_per_token(given.recipe)
    peak = chip.flops_per_second.get(PRECISION) if chip else None
    return {
        "rows": rows,
        "context": context,
        "ms": round(1e3 * middle, 3),
        "ms_of_rounds": [round(1e3 * each, 3) for each in seconds],
        "tokens_per_second": round(rows * context / middle),
        "mfu": round(flops / middle / peak, 4) if peak else None,
    }


@dataclasses.dataclass(frozen=True)
class Plan:
    figures: dict[str, Any]
    kernels: dict[str, float]
    """Milliseconds per step of each at the chip's peaks; empty if they are unknown."""


def step_of(given: Subject, mode: str, **more: Any) -> tuple[rx.DataParallel, rx.Batch]:
    """Return the step on one device, and its batch."""
    dp = rx.DataParallel(
        given.recipe.loss,
        OPTIMIZER,
        mesh=rx.make_mesh(devices=jax.devices()[:1]),
        mode=mode,
        precision=PRECISION,
        **more,
    )
    (batch,) = dp.feed(given.batch, len(given.batch["tokens"]))
    return dp, batch


def replicax(
    given: Subject, mode: str, chip: Chip | None, tuning: str | None = None
) -> tuple[Callable[[int], list[float]], Plan]:
    """Return a function that runs steps and returns their losses, and the program's plan."""
    dp, batch = step_of(given, mode, tuning=tuning)
    state = dp.init(given.recipe.model(jax.random.key(0)))
    started = time.perf_counter()
    compiled = dp.lower(state, batch).compile()
    plan = planned(compiled, chip, time.perf_counter() - started)

    return stepping(dp, state, batch), plan


def planned(compiled: jax.stages.Compiled, chip: Chip | None, seconds: float) -> Plan:
    """Plan the memory and kernels of a program, whose compilation may have been cached."""
    text, memory = compiled.as_text() or "", read_memory(compiled)
    schedule = read_schedule(text)
    kernels: dict[str, float] = {}
    at_rates: dict[str, float] = {}
    if chip and chip.memory_bytes_per_second and PRECISION in chip.flops_per_second:
        kernels = milliseconds(schedule, chip)
        if rates := RATES.get(chip.name):
            at_rates = milliseconds(schedule, chip, rates)
    figures = {
        "planned_ms": round(sum(kernels.values()), 3) if kernels else None,
        "planned_ms_at_rates": round(sum(at_rates.values()), 3) if at_rates else None,
        "planned_gb": round(memory.peak / 1e9, 3) if memory else None,
        "compile_s": round(seconds, 1),
        "kernels_a_step": sum(each.runs for each in schedule.kernels),
        "cudnn_attention_calls": text.count('custom_call_target="__cudnn$fmha'),
        "cublas_calls": text.count('custom_call_target="__cublas$'),
        "triton_fusions": text.count('"kind":"__triton'),
    }
    return Plan(figures, kernels)


def milliseconds(
    schedule: Schedule, chip: Chip, rates: MeasuredRates | None = None
) -> dict[str, float]:
    """Return the milliseconds per step of each kernel, at the chip's peaks or at `rates`."""
    return {
        each.name: 1e3 * each.runs * kernel_roofline(each, chip, rates=rates).seconds
        for each in schedule.kernels
    }


if __name__ == "__main__":
    parser = options(__doc__)
    parser.add_argument("--mode", choices=[*MODES, BY_HAND], default="single")
    parser.add_argument("--preset", choices=ROWS, default="124m")
    parser.add_argument("--padded", action="store_true", help="pad the vocabulary (by hand)")
    parser.add_argument("--record", metavar="FOLDER", help="only write the kernels of mode exact")
    parser.add_argument("--recorded", action="store_true", help="mode exact with such kernels")
    parser.add_argument("--profile", action="store_true", help="report the slowest kernels")
    answer(measure, parser)

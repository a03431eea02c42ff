"""Mode `exact`: one SHA-256 for every layout, and its cost.

1. Bits: LeNet, the NNX CNN and GPT `nano`, 200 steps with dropout, AdamW, a clipped gradient and
   padded last batches, on 15 layouts of devices and processes, and moved from 8 devices to 2
   half-way.
2. Step time relative to `shard_map` on the same devices, interleaved, in `--rounds` rounds.
3. Bytes sent per step, relative to a ring all-reduce of the same sums.
4. Seconds until the end of the first step, including compilation, and bytes per device in addition
   to the state: program outputs, and the largest temporaries.

Goals: one digest; at most 1.05 times the time of `shard_map` with the same number of micro-batches
on 4 and 8 devices, and 1.15 on 1 and 2; no more bytes than the ring. Writes `results/exact.json`
part by part: `--parts bits` leaves the times unchanged.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import exact_subjects
import jax
from timing import RESULTS, environment, interleaved, ratios, save, spread

import replicax as rx
from replicax.analysis.compiled import inspect
from replicax.core.modes.exact.fixed_tree import THREADS_VARIABLE, fix_threads
from replicax.train.run.host_memory import keep_freed_memory

NAMES = ("lenet", "cnn", "gpt2")
JOB = Path(__file__).with_name("exact_job.py")
STEPS = 200
LAYOUTS = [
    (devices, processes)
    for devices in (1, 2, 4, 8, 16, 32)
    for processes in (1, 2, 4)
    if processes <= devices
]
TIMED = (1, 2, 4, 8)
MICRO_SHARDS = 8
"""Micro-shards in the timed steps."""


def bits(name: str, steps: int) -> dict[str, Any]:
    """Return the digest of the state after `steps`, for every layout."""
    rows = []
    for number, (devices, processes) in enumerate(LAYOUTS):
        most = exact_subjects.MICRO_SHARDS // devices
        accumulate = min((1, 2, 4)[number % 3], most)
        arguments = [name, devices, accumulate, steps]
        rows.append({"devices": devices, "processes": processes, "accumulate": accumulate})
        rows[-1] |= _job(arguments, processes)
        print(f"{name:<6}{devices:>3} devices, {processes} processes: {rows[-1]}", flush=True)
    moved = {"devices": "8, then 2", "processes": 1, "accumulate": 1}
    rows.append(moved | _job([name, 8, 1, steps, 2], 1))
    digests = sorted({row["state"] for row in rows})
    print(f"{name}: {len(digests)} digest(s) on {len(rows)} layouts", flush=True)
    return {"steps": steps, "layouts": rows, "digests": digests}


def _job(arguments: list[Any], processes: int) -> dict[str, Any]:
    """Run a job and return process 0's result."""
    command = [sys.executable, str(JOB), *map(str, arguments)]
    if processes > 1:
        launch = [sys.executable, "-m", "replicax", "launch", "--processes", str(processes), "--"]
        command = [*launch, *command]
    started = time.perf_counter()
    own = {name: value for name, value in os.environ.items() if name != THREADS_VARIABLE}
    done = subprocess.run(
        command, capture_output=True, text=True, env={**own, "JAX_PLATFORMS": "cpu"}
    )
    lines = [line for line in done.stdout.splitlines() if "RESULT" in line]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} exits with {done.returncode}: {done.stderr[-2000:]}")
    told: dict[str, Any] = json.loads(lines[-1].partition("RESULT ")[2])
    return {**told, "seconds": round(time.perf_counter() - started, 1)}


def times(name: str, rounds: int) -> list[dict[str, Any]]:
    """Measure milliseconds per step by device count: `exact`, and `shard_map` with the same
    micro-batches and with whole batches."""
    rows = []
    for devices in TIMED:
        own = MICRO_SHARDS // devices
        variants = {"exact": ("exact", 1), "shard_map": ("shard_map", 1)}
        if own > 1:
            variants["shard_map, as many micro-batches"] = ("shard_map", own)
        runs = {key: _steps(name, devices, *variant) for key, variant in variants.items()}
        seconds = interleaved(runs, rounds, warmups=1)
        row: dict[str, Any] = {"devices": devices, "micro_shards_of_each": own}
        for key, values in seconds.items():
            row[key] = {"ms": spread([1000 * value for value in values])}
            if key != "exact":
                row[key]["exact_over_it"] = spread(ratios(seconds["exact"], values))
        rows.append(row)
        print(name, json.dumps(row), flush=True)
    return rows


def _steps(name: str, devices: int, mode: str, accumulate: int) -> Any:
    """Return a function that runs one step and waits for it."""
    dp, state, batch = _prepared(name, devices, mode, accumulate)
    held = [state]

    def run() -> None:
        held[0], metrics = dp.step(held[0], batch)
        jax.block_until_ready((held[0], metrics))

    return run


def _prepared(name: str, devices: int, mode: str, accumulate: int) -> Any:
    subject = exact_subjects.subject(name)
    dp = rx.DataParallel(
        subject.loss,
        exact_subjects.optimizer(),
        mesh=rx.make_mesh(data=devices),
        mode=mode,
        accumulate=accumulate,
        micro_shards=MICRO_SHARDS,
    )
    state = dp.init(subject.model(), seed=1)
    return dp, state, next(iter(dp.feed(subject.source, subject.batch_size)))


def start(name: str, rounds: int) -> list[dict[str, Any]]:
    """Measure the first step's seconds and bytes per device besides the state, by device count."""
    rows = []
    for devices in TIMED:
        variants = {"exact": 1, "shard_map": MICRO_SHARDS // devices}
        seconds: dict[str, list[float]] = {mode: [] for mode in variants}
        row: dict[str, Any] = {"devices": devices}
        for _ in range(rounds):
            for mode, accumulate in variants.items():
                jax.clear_caches()
                dp, state, batch = _prepared(name, devices, mode, accumulate)
                begun = time.perf_counter()
                state, metrics = dp.step(state, batch)
                jax.block_until_ready((state, metrics))
                seconds[mode].append(time.perf_counter() - begun)
                programs = dp.program(state).step.compiled(state, batch)
                stats = [program.memory_analysis() for program in programs]
                held = sum(each.output_size_in_bytes - each.alias_size_in_bytes for each in stats)
                row[mode] = {"bytes": held + max(each.temp_size_in_bytes for each in stats)}
        for mode, values in seconds.items():
            row[mode]["first_step_seconds"] = spread(values)
        rows.append(row)
        print(name, json.dumps(row), flush=True)
    return rows


def traffic(name: str) -> dict[str, Any]:
    """Compare the bytes each of eight devices sends in a step with a ring all-reduce."""
    moved = {}
    for mode in ("exact", "shard_map"):
        dp, state, batch = _prepared(name, 8, mode, 1)
        moved[mode] = inspect(dp.lower(state, batch).compile()).collectives
    (reduced,) = moved["shard_map"]
    sent = sum(each.bytes for each in moved["exact"]) * 7 / 8
    kinds = {each.kind: each.count for each in moved["exact"]}
    ring = 2 * 7 / 8 * reduced.bytes
    print(f"{name}: {sent / ring:.5f} of a ring's {ring:,.0f} bytes, {kinds}", flush=True)
    return {"collectives": kinds, "sent_bytes": sent, "ring_bytes": ring}


def main() -> None:
    """Run the requested parts, and save them alongside the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="bits,times,traffic,start")
    parser.add_argument("--subjects", default=",".join(NAMES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    fix_threads(MICRO_SHARDS)
    jax.config.update("jax_num_cpu_devices", max(TIMED))
    keep_freed_memory()
    path = RESULTS / "exact.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result["micro_shards"] = {"bits": exact_subjects.MICRO_SHARDS, "times": MICRO_SHARDS}
    result["batch_size"] = {name: exact_subjects.subject(name).batch_size for name in NAMES}
    for part in options.parts.split(","):
        for name in options.subjects.split(","):
            found = {
                "bits": lambda name: bits(name, options.steps),
                "times": lambda name: times(name, options.rounds),
                "traffic": traffic,
                "start": lambda name: start(name, 3),
            }[part](name)
            result.setdefault(part, {})[name] = found
            save("exact", {**result, "environment": environment()})


if __name__ == "__main__":
    main()

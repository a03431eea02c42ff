"""Draw steps and losses at random, and compare what is accepted with one device.

    python benchmarks/rows.py --programs 2000 --workers 2

Each program is built from parts that keep rows apart and, in about half of the programs, one that
mixes them: always, by a schedule, a gate, an `rx.Shared`, a branch, a loop, or a mask of some rows.
It runs for several steps in `shard_map`, with padding that cannot be left out, and one in four with
two micro-batches. A silent difference is a program that is accepted and trains on other numbers.
Writes `results/rows.json` as it goes.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")

import jax
from row_programs import ROWS, SHORT, Program, differs
from timing import environment, save

TOLERANCE = 3e-5
"""Relative difference of a loss or metric from one device that counts as other numbers."""
CASES = (("shard_map", 1, ROWS), ("jit", 1, SHORT), ("jit", 2, ROWS))
ROUNDING = 1e-10
"""The same in float64, for a difference in float32 that is rounding which grows while training."""
CLEARED_EVERY, SHOWN_EVERY_SECONDS = 25, 30


def in_float64(program: Program, mode: str, accumulate: int, rows: int) -> float:
    """Return the difference from one device in float64."""
    with jax.enable_x64(True):
        found, plain = program.found(mode, accumulate, rows), program.plain(rows)
    return float("inf") if isinstance(found, str) else differs(found, plain)


class Counts:
    """Outcomes of some programs."""

    def __init__(self) -> None:
        self.programs = 0
        self.cases: collections.Counter[str] = collections.Counter()
        self.silent: list[str] = []
        self.rounding: list[str] = []
        """Differences that are none in float64."""
        self.refused: list[str] = []
        """Refusals of programs whose rows stay apart, and errors that are no refusal."""

    def add(self, seed: int) -> None:
        """Run the program of `seed` in each case that applies to it."""
        program, plain = Program.drawn(seed), {}
        kind = "apart" if program.apart else "mixed"
        for mode, accumulate, rows in CASES if seed % 4 == 0 else CASES[:2]:
            if rows == SHORT and "mean" in (program.end, program.metrics):
                continue  # one number cannot leave padding out
            if accumulate > 1 and program.closure:
                continue  # a loss that closes over all rows cannot be computed on some
            case = f"{seed}, {mode}, {accumulate} parts, {rows} rows: {program}"
            try:
                found = program.found(mode, accumulate, rows)
            except Exception as error:
                self.cases["other errors"] += 1
                self.refused.append(f"{case}: {type(error).__name__}: {error}"[:400])
                continue
            refused = isinstance(found, str)
            self.cases[f"{kind}, {'refused' if refused else 'accepted'}"] += 1
            if isinstance(found, str):
                self.refused += [f"{case}: {found}"[:400]] * program.apart
                continue
            if rows not in plain:
                plain[rows] = program.plain(rows)
            if (gap := differs(found, plain[rows])) > TOLERANCE:
                exact = in_float64(program, mode, accumulate, rows)
                of = self.rounding if exact < ROUNDING else self.silent
                of.append(f"{case}: {gap:.1e}, in float64 {exact:.1e}")
        self.programs += 1

    def merge(self, other: dict[str, Any]) -> None:
        """Add the outcomes of a worker."""
        self.programs += other["programs"]
        self.cases.update(other["cases"])
        self.silent += other["silent"]
        self.rounding += other["rounding"]
        self.refused += other["refused"]

    def result(self) -> dict[str, Any]:
        """Return what is written to a file."""
        accepted, refused = (self.cases[f"apart, {each}"] for each in ("accepted", "refused"))
        share = accepted / max(1, accepted + refused)
        return {**vars(self), "cases": dict(self.cases), "share of apart accepted": share}


def work(first: int, programs: int, path: Path) -> None:
    """Run some programs, writing the outcomes after each."""
    counts = Counts()
    for seed in range(first, first + programs):
        counts.add(seed)
        path.write_text(json.dumps(counts.result()))
        if seed % CLEARED_EVERY == 0:
            jax.clear_caches()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into:
        work(options.first, options.programs, options.into)
        return
    each, started = -(-options.programs // options.workers), time.time()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{n}.json") for n in range(options.workers)]
        workers = []
        for n, path in enumerate(paths):
            own = ["--first", str(options.first + n * each), "--programs", str(each)]
            command = [sys.executable, __file__, *own, "--into", str(path)]
            workers.append(subprocess.Popen(command))
        running = True
        while running:
            time.sleep(SHOWN_EVERY_SECONDS)
            running = any(worker.poll() is None for worker in workers)
            total = Counts()
            for path in paths:
                try:
                    total.merge(json.loads(path.read_text()))
                except (FileNotFoundError, json.JSONDecodeError):  # not yet written, or being so
                    continue
            seconds = round(time.time() - started)
            ran = {"first seed": options.first, "workers": options.workers, "seconds": seconds}
            save("rows", {**total.result(), **ran, **environment()})
            print(f"{total.programs} programs, {dict(total.cases)}, {seconds} s", flush=True)
            for line in total.silent:
                print("SILENT", line, flush=True)


if __name__ == "__main__":
    main()

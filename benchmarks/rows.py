"""Draw steps and losses at random, and compare what is accepted with one device.

    python benchmarks/rows.py --programs 1300 --workers 2

Each program is built from parts that keep rows apart and, in about half of the programs, one that
mixes them, with or without care for padding, draws random numbers, or has a backward pass of its
own: always, by a schedule, a gate, an `rx.Replicated`, a branch, a loop, in the gradient only, or a
mask of some rows. It runs in up to four cases (a mode, devices, micro-batches) on a sequence of
full and short batches, whose later numbers may be unlike those of the first. Means, gradients and
rows of a state of each step are compared with plain JAX on the real rows. A silent difference is a
program that is accepted and has other numbers. Writes `results/rows.json` as it goes.

    python benchmarks/rows.py --smallest 5019

shows the program of a seed, and the smallest one with the same silent difference.
"""

import argparse
import collections
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # not in its tests, which start other processes
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=1")

import jax
from row_draws import drawn, smaller
from row_programs import Case, Program
from row_verdict import Verdict, verdict
from timing import environment, save

from replicax.core.first_step.loss_check import LossExamination
from replicax.core.jaxprs.row_evaluation import Undecided

CASES_OF_EACH = 4
CLEARED_EVERY, SHOWN_EVERY_SECONDS = 25, 30


def without_explanations() -> None:
    """Let refusals that numbers cannot change say nothing about numbers: half of all time."""
    compared = LossExamination.compared

    def only_with_padding(self: Any, division: Any, *given: Any) -> Any:
        if not division.padded:
            raise Undecided("not computed")
        return compared(self, division, *given)

    LossExamination.compared = only_with_padding  # type: ignore[method-assign]


class Counts:
    """Outcomes of some programs."""

    def __init__(self) -> None:
        self.programs = 0
        self.cases: collections.Counter[str] = collections.Counter()
        self.silent: list[str] = []
        self.rounding: list[str] = []
        """Differences that are none in float64, or no more than rounding makes."""
        self.refused: list[str] = []
        """Refusals of programs whose rows stay apart."""
        self.refused_careful: list[str] = []
        """Those of programs that leave padding out, where they may gather."""
        self.raw: list[str] = []
        """Errors that are no refusal."""
        self.looser: list[str] = []
        """Programs in low precision that are accepted, and refused in float32."""

    def add(self, seed: int) -> None:
        """Run the program of `seed` in some of the cases that apply to it."""
        program = drawn(seed)
        plain = program.plain()
        for case in program.cases(random.Random(seed), CASES_OF_EACH):
            said = f"{seed}, {case}: {program}"
            try:
                found, why = program.found(case)
            except Exception as error:
                self.cases["raw errors"] += 1
                self.raw.append(f"{said}: {type(error).__name__}: {error}"[:400])
                continue
            self.cases[f"{program.kind}, {'refused' if why else 'accepted'}"] += 1
            if why and program.kind == "apart":
                self.refused.append(f"{said}: {why}"[:500])
            if why and program.kind == "careful" and case.accumulate == 1:
                self.refused_careful.append(f"{said}: {why}"[:500])
            judged = verdict(program, case, found, plain)
            if judged.kind != "same":
                getattr(self, judged.kind).append(f"{said}: {judged.said}")
            elif program.low and program.weighs and not why:
                refused = program.at("float32").found(case)[1]
                self.looser += [f"{said}: {refused}"[:500]] * bool(refused)
        self.programs += 1

    def merge(self, other: dict[str, Any]) -> None:
        """Add the outcomes of a worker."""
        self.programs += other["programs"]
        self.cases.update(other["cases"])
        for name in LISTS:
            getattr(self, name).extend(other[name])

    def result(self) -> dict[str, Any]:
        """Return what is written to a file."""
        shares = {}
        for kind in ("apart", "careful"):
            accepted, refused = (self.cases[f"{kind}, {each}"] for each in ("accepted", "refused"))
            shares[f"share of {kind} accepted"] = accepted / max(1, accepted + refused)
        return {**vars(self), "cases": dict(self.cases), **shares}


LISTS = ("silent", "rounding", "refused", "refused_careful", "raw", "looser")


def judged(program: Program, case: Case) -> Verdict:
    """Run one program in one case."""
    return verdict(program, case, program.found(case)[0], program.plain())


def smallest(seed: int) -> None:
    """Print the program of a seed, and smaller ones as long as they differ silently."""
    program = drawn(seed)
    for case in program.cases(random.Random(seed), CASES_OF_EACH):
        found, why = program.found(case)
        told = verdict(program, case, found, program.plain())
        print(f"{program.kind}: {program}, {case}: {told.kind}, {told.said}, {why}", flush=True)
        if told.kind != "silent":
            continue
        least, tried = program, True
        while tried:
            tried = False
            for other in smaller(least):
                try:
                    again = judged(other, case)
                except Exception:  # parts that need one that was left out
                    continue
                if again.kind == "silent":
                    least, tried = other, True
                    break
        print(f"SMALLEST {case}: {least!r}: {judged(least, case).said}", flush=True)


def work(first: int, programs: int, path: Path) -> None:
    """Run some programs, writing the outcomes after each."""
    without_explanations()
    logging.getLogger("replicax").setLevel(logging.ERROR)
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
    parser.add_argument("--smallest", type=int, metavar="SEED", help="show one program instead")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.smallest is not None:
        smallest(options.smallest)
        return
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
            count = sum(total.cases.values())
            ran = {"first seed": options.first, "workers": options.workers, "seconds": seconds}
            ran["cases per second and worker"] = round(count / max(1, seconds) / options.workers, 3)
            save("rows", {**total.result(), **ran, **environment()})
            print(f"{total.programs} programs, {dict(total.cases)}, {seconds} s", flush=True)
            for line in total.silent:
                print("SILENT", line, flush=True)


if __name__ == "__main__":
    main()

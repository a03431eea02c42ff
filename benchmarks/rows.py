"""Draw steps and losses at random, and compare what is accepted with one device.

    python benchmarks/rows.py --programs 2000 --seed 0 --result benchmarks/results/rows.json

Each program is built from parts that keep rows apart and, in about half of the programs, one that
mixes them: always, by a schedule, a gate, an `rx.Shared`, a branch, a loop, or a mask of some rows.
It runs for several steps in `shard_map`, with two micro-batches, and with padding that cannot be
left out. A silent difference is a program that is accepted and trains on other numbers.
"""

import argparse
import collections
import json
import os
import platform
import time
from pathlib import Path

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
from row_programs import ROWS, SHORT, Program, differs

TOLERANCE = 3e-5
"""Relative difference of a loss or metric from one device that counts as other numbers."""
CASES = (("shard_map", 1, ROWS), ("jit", 1, SHORT), ("jit", 2, ROWS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="that of the first program")
    parser.add_argument("--result", type=Path, help="JSON file to write")
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    silent, refused, started = [], [], time.time()
    for seed in range(options.seed, options.seed + options.programs):
        program, plain = Program.drawn(seed), {}
        for mode, accumulate, rows in CASES if seed % 4 == 0 else CASES[:2]:
            if rows == SHORT and "mean" in (program.end, program.metrics):
                continue  # one number cannot leave padding out
            if accumulate > 1 and program.closure:
                continue  # a loss that closes over all rows cannot be computed on some
            case, kind = (
                f"{mode}, {accumulate} parts, {rows} rows",
                "apart" if program.apart else "mixed",
            )
            try:
                found = program.found(mode, accumulate, rows)
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
                counts["raw errors"] += 1
                print(f"{seed} RAW {case}: {program}: {found[:200]}", flush=True)
            if isinstance(found, str):
                counts[f"{kind}, refused"] += 1
                if program.apart:
                    refused.append(f"{seed}, {case}: {program}: {found}")
                    print("REFUSED", refused[-1][:400], flush=True)
                continue
            counts[f"{kind}, accepted"] += 1
            if rows not in plain:
                plain[rows] = program.plain(rows)
            gap = differs(found, plain[rows])
            if gap > TOLERANCE:
                silent.append(f"{seed}, {case}: {program}: {gap:.1e}")
                print("SILENT", silent[-1], flush=True)
        if seed % 50 == 49:
            jax.clear_caches()
            print(
                f"{seed + 1}: {dict(counts)}, {len(silent)} silent, {time.time() - started:.0f} s",
                flush=True,
            )
    apart = counts["apart, accepted"] / max(1, counts["apart, accepted"] + counts["apart, refused"])
    result = {
        "programs": options.programs,
        "first seed": options.seed,
        "counts": dict(counts),
        "silent": silent,
        "share of independent accepted": round(apart, 4),
        "refused though independent": [each[:300] for each in refused],
        "jax": jax.__version__,
        "python": platform.python_version(),
        "seconds": round(time.time() - started),
    }
    print(json.dumps(result, indent=1))
    if options.result:
        options.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Search for a hostile input that ends in anything but one line.

Every single-bit flip of every small file of a run, and random run folders, configurations, command
lines and environments. Writes `results/hostile.json`.
"""

import argparse
import collections
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}  # before jax is imported

from timing import environment, save

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import hostile, small_files

from replicax.train.files import lease

TRIALS = {"folder": 200, "config": 150, "command line": 120, "environment": 30}


def flips(task: tuple[Path, Path, int]) -> tuple[str, int, list[str]]:
    """Flip every `every`th bit of a file of the run; the file, the number, and what is wrong."""
    original, name, every = task
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "run"
        expected = small_files.outcome(Path(shutil.copytree(original, Path(folder) / "expected")))
        bits = range(0, 8 * (original / name).stat().st_size, every)
        found = (small_files.unnoticed(original, name, bit, at, expected) for bit in bits)
        return name.as_posix(), len(bits), [wrong for wrong in found if wrong]


def trial(task: tuple[str, int, Path]) -> tuple[str, str | None]:
    """Do one trial; its kind, and what is wrong."""
    kind, seed, original = task
    lease.EXPIRE_SECONDS = 0.5
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch("replicax.train.hooks.curves.start_drawing"),  # takes longer than the run
    ):
        return kind, hostile.trial(kind, seed, original, Path(folder) / "at")


def main() -> None:
    """Run both searches, and print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="flip every nth bit")
    parser.add_argument("--share", type=float, default=1.0, help="of the trials")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    started, wrong = time.monotonic(), list[str]()
    counts: collections.Counter[str] = collections.Counter()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, spawn.Pool(given.workers) as pool:
        run, complete = Path(folder) / "run", Path(folder) / "complete"
        complete.mkdir()
        small_files.make_run(run)
        hostile.make_run(complete)
        files = [path.relative_to(run) for path in small_files.small_files(run)]
        for name, count, faults in pool.imap_unordered(
            flips, [(run, file, given.every) for file in files]
        ):
            counts[f"flips of {name}"] += count
            wrong += faults
            print(f"{name}: {count:,} flips, {len(faults)} unnoticed or worse", flush=True)
        tasks = [
            (kind, seed, complete)
            for kind, number in TRIALS.items()
            for seed in range(round(number * given.share))
        ]
        for kind, fault in pool.imap_unordered(trial, tasks):
            counts[kind] += 1
            if fault:
                wrong.append(fault)
                print(fault, flush=True)
    result: dict[str, Any] = {
        "counts": dict(counts),
        "wrong": wrong,
        "seconds": round(time.monotonic() - started),
        **environment(),
    }
    print(dict(counts), f"{len(wrong)} wrong, {result['seconds']} s", save("hostile", result))


if __name__ == "__main__":
    main()

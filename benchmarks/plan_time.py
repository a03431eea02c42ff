"""Time of `replicax plan` to its answer and to its end, with an empty and a full cache of plans.

Each plan is a process of its own. Goal: the answer within 15 s, everything within 60 s, again in
5 s, on two quiet cores. Writes `results/plan_time.json`. Targets without a compiler are planned by
formula: put the folder that `make compilers` fills on `PYTHONPATH`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import environment, save

TARGETS = ("h100:8", "cpu:8", "v100:8", "v5e:16x16")
ANSWER = "fits"
"""The word in the margin of the answer."""


def plan(arguments: list[str], folder: Path) -> dict[str, Any]:
    """Run the command in `folder`, where its cache is; return seconds, and steps compiled."""
    kept = folder / "cache" / "plans"
    before = set(kept.glob("*"))
    command = [sys.executable, "-m", "replicax", "plan", *arguments]
    surroundings = {**os.environ, "REPLICAX_CACHE": str(folder / "cache")}
    started, answer = time.perf_counter(), None
    with subprocess.Popen(
        command, cwd=folder, env=surroundings, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(ANSWER):
                answer = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "answer_seconds": answer,
        "seconds": time.perf_counter() - started,
        "compiled": len(set(kept.glob("*")) - before),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--recipe", nargs="+", default=["gpt2", "--preset", "124m"])
    args = parser.parse_args()
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for target in args.targets:
        runs[target] = {"empty": [], "full": []}
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                for cache, each in runs[target].items():
                    flags = ["--target", target, "--run", cache]
                    each.append(plan([*args.recipe, *flags], Path(folder)))
                    last = each[-1]
                    print(
                        f"{target}, {cache} cache: answer {last['answer_seconds']:.1f} s, "
                        f"end {last['seconds']:.1f} s, {last['compiled']} compiled",
                        flush=True,
                    )
    save("plan_time", {**environment(), "recipe": args.recipe, "runs": runs})


if __name__ == "__main__":
    main()

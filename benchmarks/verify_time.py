"""Time of `replicax verify` for every recipe and for a small NNX model, in fresh processes.

Goals on 2 cores with 8 simulated devices: a recipe at most 8 s, the NNX model (BatchNorm, Dropout,
5,000 parameters) at most 20 s, and the first verdict, on the step's own mode on all devices, at
most 3 s after the first program is compiled. Each is verified with an empty cache of compiled
programs, and once again with what it kept. Writes `results/verify_time.json`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from timing import environment, save, spread

RECIPES = ("linear_regression", "mlp", "lenet", "cnn", "gpt2")
MODEL = "verify_time_model.py:Small"
"""The NNX model, as a recipe in a file beside this one."""


def child(name: str) -> None:
    """Verify a recipe, and print the seconds of its stages as JSON after the table."""
    import jax

    from replicax.cli.verify import verify
    from replicax.verify.verification import GrowingTable

    began = float(os.environ["VERIFY_TIME_BEGAN"])
    told: dict[str, float] = {}
    compilations: list[float] = []
    add = GrowingTable.add

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compilations.append(seconds)
            told.setdefault("compiled", time.time() - began)

    def found(table: GrowingTable, check: Any) -> None:
        add(table, check)
        if check.case.endswith(", full"):
            told.setdefault("verdict", time.time() - began)

    jax.monitoring.register_event_duration_secs_listener(listen)
    GrowingTable.add = found  # type: ignore[method-assign]
    code = verify([name])
    cpu = time.process_time()
    figures = {**told, "code": code, "compilations": len(compilations), "cpu": cpu}
    print(json.dumps({**figures, "seconds": time.time() - began}))


def run(name: str, cache: str) -> dict[str, float]:
    """Return the figures of one fresh process."""
    own = {"VERIFY_TIME_BEGAN": str(time.time()), "REPLICAX_CACHE": cache}
    command = [sys.executable, __file__, "--child", name]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own})
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0, done.stdout
    return {**found, "to_verdict": found["verdict"] - found["compiled"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="some of the subjects")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    subjects = options.only or [*RECIPES, str(Path(__file__).parent / MODEL)]
    runs: dict[str, list[dict[str, float]]] = {Path(name).stem: [] for name in subjects}
    order = random.Random(0)
    for _ in range(options.rounds):
        for name in order.sample(subjects, len(subjects)):
            with tempfile.TemporaryDirectory() as cache:
                first, again = run(name, cache), run(name, cache)
            runs[Path(name).stem].append({**first, "seconds_again": again["seconds"]})
    result = {
        name: {key: spread([each[key] for each in several]) for key in several[0]}
        for name, several in runs.items()
    }
    for name, figures in result.items():
        print(
            name, {key: figures[key] for key in ("seconds", "to_verdict", "cpu", "seconds_again")}
        )
    save("verify_time", {**environment(), "rounds": options.rounds, "subjects": result})


if __name__ == "__main__":
    main()

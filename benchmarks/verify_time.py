"""Time of `replicax verify` for every recipe and for a small NNX model, in fresh processes.

Goals on 2 cores with 8 simulated devices, in the step's own mode, and once again with the programs
that the first kept: linear_regression 3 and 2 s, mlp 4 and 3, lenet 8 and 5, cnn 10 and 6, the NNX
model (BatchNorm, Dropout, 5,000 parameters) 8 and 5, gpt2 nano 30 and 15; the first row within 3 s;
all modes, with what the own mode kept, within 1.6 times its time. Writes
`results/verify_time.json`, which has the seconds of the first row and of the first parity, too.
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


def child(name: str, *flags: str) -> None:
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

    def found(table: GrowingTable, check: Any) -> None:
        add(table, check)
        told.setdefault("row", time.time() - began)
        if check.case.endswith(", full"):
            told.setdefault("parity", time.time() - began)

    jax.monitoring.register_event_duration_secs_listener(listen)
    GrowingTable.add = found  # type: ignore[method-assign]
    code = verify([name, *flags])
    cpu = time.process_time()
    figures = {**told, "code": code, "compilations": len(compilations), "cpu": cpu}
    print(json.dumps({**figures, "seconds": time.time() - began}))


def run(name: str, cache: str, *flags: str) -> dict[str, float]:
    """Return the figures of one fresh process."""
    own = {"VERIFY_TIME_BEGAN": str(time.time()), "REPLICAX_CACHE": cache}
    command = [sys.executable, __file__, "--child", name, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own})
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    assert found["code"] == 0, done.stdout
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="some of the subjects")
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
        return
    options = parser.parse_args()
    subjects = options.only or [*RECIPES, str(Path(__file__).parent / MODEL)]
    runs: dict[str, list[dict[str, float]]] = {Path(name).stem: [] for name in subjects}
    order = random.Random(0)
    for _ in range(options.rounds):
        for name in order.sample(subjects, len(subjects)):
            with tempfile.TemporaryDirectory() as cache:
                first, again = run(name, cache), run(name, cache)
                every = run(name, cache, "--modes", "all")
            runs[Path(name).stem].append(
                {**first, "seconds_again": again["seconds"], "seconds_all": every["seconds"]}
            )
    result = {
        name: {key: spread([each[key] for each in several]) for key in several[0]}
        for name, several in runs.items()
    }
    for name, figures in result.items():
        print(
            name,
            {
                key: [round(each, 2) for each in figures[key]]
                for key in ("row", "parity", "seconds", "seconds_again", "seconds_all", "cpu")
            },
        )
    save("verify_time", {**environment(), "rounds": options.rounds, "subjects": result})


if __name__ == "__main__":
    main()

"""Detection rate and cost of audits on eight CPU devices.

1. Flips: one random bit of one random device before one random step, separately in the weights, the
   optimizer state and the model's other arrays: `tests/support/audit_trials.py`.
2. Clean audits: no alarm while nothing is wrong.
3. Cost: LeNet and GPT `nano`, an audit every 100 steps. Interleaved wall and CPU times of a step,
   a guarded step, and an audit.

Goals: every flip that persists until the next audit is found and its device named; no alarm in
100,000 clean audits; less than 1 % of the step time. Writes `results/audit.json`.
"""

import argparse
import collections
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from timing import RESULTS, environment, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
DEVICES = 8
jax.config.update("jax_num_cpu_devices", DEVICES)

from support.audit_trials import AUDIT_EVERY, STEPS, SUBJECTS, Subject  # noqa: E402

import replicax as rx  # noqa: E402
from replicax.recipes import transformer  # noqa: E402
from replicax.recipes.gpt2 import GPT2  # noqa: E402
from replicax.recipes.lenet import LeNet  # noqa: E402
from replicax.train.files.fingerprint import Fingerprint  # noqa: E402
from replicax.train.guarded import guarded  # noqa: E402
from replicax.train.hooks.audit import Snapshot  # noqa: E402
from replicax.train.run.host_memory import keep_freed_memory  # noqa: E402

CLEAR = "\r\x1b[K" if sys.stdout.isatty() else ""
PARTS = {"weights": "params", "optimizer": "opt_state", "extras": "extras"}
EVERY = 100
"""Steps between two audits, for the reported cost."""


def flips(subjects: list[Subject], part: str, persistent: int, seed: int) -> dict[str, Any]:
    """Run trials until `persistent` flips have persisted until the next audit, or have healed."""
    having = [each for each in subjects if any(x.startswith(PARTS[part]) for x in each.leaves)]
    draw = np.random.default_rng(seed)
    outcomes: collections.Counter[str] = collections.Counter()
    per_subject: dict[str, collections.Counter[str]] = {}
    failures = []
    while sum(outcomes.values()) - outcomes["healed"] < persistent:
        subject = having[sum(outcomes.values()) % len(having)]
        trial = subject.trial(PARTS[part], draw)
        outcomes[trial.outcome] += 1
        name = f"{subject.name}, {subject.mode}"
        per_subject.setdefault(name, collections.Counter())[trial.outcome] += 1
        if trial.outcome not in ("detected", "healed"):
            failures.append(vars(trial))
            print(f"{CLEAR}{trial}", flush=True)
        if CLEAR:
            print(f"{CLEAR}flips in the {part}: {dict(outcomes)}", end="", flush=True)
        if outcomes["healed"] > persistent:
            break
    print(f"{CLEAR}flips in the {part}, seed {seed}: {dict(outcomes)}", flush=True)
    return {
        "seed": seed,
        "trials": sum(outcomes.values()),
        **outcomes,
        "subjects": {name: dict(counts) for name, counts in per_subject.items()},
        "failures": failures,
    }


def clean(subjects: list[Subject], audits: int) -> dict[str, Any]:
    """Run with an audit after every step; an alarm would stop the run."""
    done: dict[str, int] = {}
    for subject in subjects:
        steps = -(-audits // len(subjects))
        started = time.monotonic()
        audit = rx.hooks.Audit(1)
        subject.run(steps=steps, hooks=[audit], log_every=1000)
        done[f"{subject.name}, {subject.mode}"] = audit.clean
        print(
            f"clean audits, {subject.name}, {subject.mode}: {audit.clean:,} "
            f"({time.monotonic() - started:.0f} s)",
            flush=True,
        )
    return {"audits": sum(done.values()), "alarms": 0, "subjects": done}


def lenet() -> tuple[Any, Any, Any, int]:
    """Return the recipe, model, data and batch size of LeNet."""
    recipe, draw = LeNet(), np.random.default_rng(0)
    images = draw.integers(0, 256, (recipe.batch_size, 28, 28, 1)).astype(np.uint8)
    labels = draw.integers(0, 10, recipe.batch_size).astype(np.int32)
    model = recipe.model(jax.random.key(0))
    return recipe, model, {"image": images, "label": labels}, recipe.batch_size


def gpt() -> tuple[Any, Any, Any, int]:
    """Return the same for GPT `nano` on bytes."""
    recipe, draw = GPT2(), np.random.default_rng(0)
    shape = transformer.Shape(recipe.layers, recipe.heads, recipe.width, recipe.context, 257)
    rows, context = recipe.batch_size, recipe.context
    data = {
        "tokens": draw.integers(0, 256, (rows, context + 1)).astype(np.uint16),
        "length": np.full(rows, context, np.int32),
        "bytes": np.full(rows, context, np.int32),
    }
    return recipe, transformer.init(shape, jax.random.key(0)), data, rows


MODELS = {"lenet": lenet, "gpt2 nano": gpt}


def cost(make: Callable[[], Any], rounds: int) -> dict[str, Any]:
    """Measure the milliseconds of each part, and the overhead of an audit every 100 steps."""
    recipe, model, data, batch_size = make()
    plain = rx.DataParallel(recipe.loss, recipe.optimizer())
    states = {"step": plain.init(model), "guarded step": plain.init(model)}
    dps = {"step": plain, "guarded step": guarded(plain, states["step"])}
    fingerprint = Fingerprint(states["step"])
    (batch,) = plain.feed(data, batch_size)

    def step(name: str) -> None:
        states[name], metrics = dps[name].step(states[name], batch)
        jax.block_until_ready((states[name], metrics))

    runs: dict[str, Callable[[], Any]] = {
        "step": lambda: step("step"),
        "guarded step": lambda: step("guarded step"),
        "audit": lambda: fingerprint.differences(fingerprint.take(states["step"])),
        "copy to the host": lambda: Snapshot(states["step"]),
    }
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for number in range(rounds + 2):
        for name in order.sample(list(runs), len(runs)):
            begun = time.perf_counter(), time.process_time()
            runs[name]()
            if number >= 2:
                wall[name].append(time.perf_counter() - begun[0])
                cpu[name].append(time.process_time() - begun[1])
    return {
        "bytes_compared_per_device": fingerprint.compared_bytes,
        "leaves": len(fingerprint.compared),
        "rounds": rounds,
        "wall_milliseconds": {name: _spread(values) for name, values in wall.items()},
        "cpu_milliseconds": {name: _spread(values) for name, values in cpu.items()},
        "percent_of_the_step_time": {
            "wall": _percent(wall),
            "cpu": _percent(cpu),
        },
    }


def _spread(seconds: list[float]) -> list[float]:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return [round(each * 1e3, 3) for each in (middle, low, high)]


def _percent(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return percentages of the plain step's time, by medians; for the guard, of round ratios."""
    step = statistics.median(seconds["step"])
    audit = statistics.median(seconds["audit"]) / EVERY / step
    pairs = zip(seconds["guarded step"], seconds["step"], strict=True)
    guard = statistics.median(guarded / plain for guarded, plain in pairs) - 1
    copy = statistics.median(seconds["copy to the host"]) / EVERY / step
    shares = {"audit": audit, "guard": guard, "audit and guard": audit + guard, "copy": copy}
    return {name: round(100 * share, 3) for name, share in shares.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--flips", type=int, default=1000, help="flips in the weights (1000)")
    parser.add_argument("--audits", type=int, default=100_000, help="clean audits (100000)")
    parser.add_argument("--rounds", type=int, default=200, help="timing rounds (200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the flips (0)")
    parser.add_argument("--dry", action="store_true", help="write no file")
    options = parser.parse_args()
    keep_freed_memory()
    if options.rounds:
        keep(options, cost={name: told(name, options.rounds) for name in MODELS})
    subjects = [Subject(*each) for each in SUBJECTS if options.flips or options.audits]
    failed = False
    if options.flips:
        counts = {"weights": options.flips, "optimizer": options.flips // 4}
        counts["extras"] = options.flips // 4
        found = {part: flips(subjects, part, count, options.seed) for part, count in counts.items()}
        settings = {"audit_every": AUDIT_EVERY, "steps_of_a_trial": STEPS}
        keep(options, flips={**settings, **found})
        failed = any(each["failures"] for each in found.values())
    if options.audits:
        keep(options, clean=clean(subjects, options.audits))
    sys.exit(failed)


def told(name: str, rounds: int) -> dict[str, Any]:
    found = cost(MODELS[name], rounds)
    print(f"cost, {name}: {found['wall_milliseconds']} ms")
    print(f"cost, {name}, percent: {found['percent_of_the_step_time']}", flush=True)
    return found


def keep(options: argparse.Namespace, **parts: dict[str, Any]) -> None:
    """Save new measurements alongside earlier ones, each with its date and versions."""
    if options.dry:
        return
    path = RESULTS / "audit.json"
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, part in parts.items():
        result[name] = {"environment": environment(), "devices": DEVICES, **part}
    print(f"see {save('audit', result)}", flush=True)


if __name__ == "__main__":
    main()

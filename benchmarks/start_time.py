"""Time from `replicax train RECIPE` to the first finished step, in fresh processes, by phase.

    imports   Python, JAX and the recipe's module, up to the command's own work
    data      reading and making the rows
    model     the initial model and state
    memory    micro-batches that fit, by formula, which traces the loss
    examine   checks of the loss before the first step, on its traces
    compile   tracing, lowering and compiling the step, or reading it from the cache
    other     the run's folder, its lease and fingerprints, the first step itself

Each recipe starts without JAX's persistent cache, with an empty one, and with that one again. All
are interleaved; the three must evaluate alike after two steps. Writes
`results/start.json`: medians of wall and CPU seconds, of the programs that were compiled and read
with a cache, and of all until the first step has finished.
"""

import argparse
import collections
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import environment, save

RECIPES = {
    "linear_regression": [],
    "mlp": [],
    "lenet": [],
    "cnn": [],
    "gpt2": ["--layers", "2", "--width", "64", "--heads", "2", "--context", "64"],
}
"""Recipe, and its flags."""
CACHES = ("none", "cold", "warm")


def child(arguments: list[str], began: float) -> None:
    """Run the command up to `--steps` steps; print the seconds of the first one, by phase."""
    phases: dict[str, float] = collections.defaultdict(float)
    counts: collections.Counter[str] = collections.Counter()
    stack: list[str] = []
    since = began

    def enter(phase: str | None) -> None:
        nonlocal since
        now = time.time()
        phases[stack[-1] if stack else "imports"] += now - since
        since = now
        if phase is None:
            stack.pop()
        else:
            stack.append(phase)

    def timed(owner: Any, name: str, phase: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def run(*given: Any, **options: Any) -> Any:
            enter(phase)
            try:
                return original(*given, **options)
            finally:
                enter(None)

        setattr(owner, name, run)

    import jax

    from replicax import cli
    from replicax.cli import train
    from replicax.core.call_checks import CallChecks
    from replicax.core.data_parallel import DataParallel
    from replicax.train.run.fit import Run

    events = {"cache_hits": "read", "cache_misses": "compiled"}  # after /jax/compilation_cache/
    jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: counts.update([event])
    )
    timed(train, "data_lines", "data")
    timed(train, "initial_model", "model")
    timed(train, "in_micro_batches", "memory")
    timed(DataParallel, "init", "model")
    timed(CallChecks, "check", "examine")
    timed(CallChecks, "check_memory", "compile")
    parse: Callable[..., Any] = train.parse_with_recipe

    def parsed(*given: Any) -> Any:
        found = parse(*given)
        kind = type(found.recipe)
        timed(kind, "train_source", "data")
        timed(kind, "eval_source", "data")
        enter("other")
        return found

    train.parse_with_recipe = parsed
    step = Run.step
    first: dict[str, float] = {}

    def finished(run: Any, batch: Any) -> Any:
        metrics = step(run, batch)
        if not first:
            jax.block_until_ready(run.state)
            stack.append("other")
            enter(None)
            first.update(phases, wall=time.time() - began, cpu=time.process_time())
            told = {text: counts[f"/jax/compilation_cache/{name}"] for name, text in events.items()}
            first.update(told, programs=counts["/jax/core/compile/backend_compile_duration"])
        return metrics

    Run.step = finished  # type: ignore[method-assign]
    cli.main(["train", *arguments])
    print(json.dumps(first))


def start(recipe: str, cache: Path | None, folder: Path) -> dict[str, Any]:
    """Run a start in a process of its own."""
    flags = [recipe, *RECIPES[recipe], "--steps", "2", "--run", f"{time.time_ns()}"]
    of_user = {name: text for name, text in os.environ.items() if not name.startswith("JAX_")}
    env = {**of_user, "JAX_ENABLE_COMPILATION_CACHE": str(cache is not None).lower()}
    done = subprocess.run(
        [sys.executable, __file__, "--child", repr(time.time()), *flags],
        env={**env, "XDG_CACHE_HOME": str(cache or folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    *_, last = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(last)
    evaluated = [line for line in done.stdout.splitlines() if line.startswith("eval ")]
    return {**found, "evaluated": evaluated}


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[3:], float(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--recipes", nargs="*", default=[*RECIPES], choices=RECIPES)
    args = parser.parse_args()
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as at:
        for number in range(args.rounds):
            for recipe in args.recipes:
                cache = Path(at) / f"{recipe}-{number}"
                for name in CACHES:
                    took = start(recipe, None if name == "none" else cache, Path(at))
                    found.setdefault(recipe, {}).setdefault(name, []).append(took)
    result: dict[str, Any] = {}
    for recipe, each in found.items():
        same = {str(took.pop("evaluated")) for starts in each.values() for took in starts}
        assert len(same) == 1, f"{recipe}: a cached program computed something else: {same}"
        for name, starts in each.items():
            keys = dict.fromkeys(key for took in starts for key in took)
            middle = {k: statistics.median(took.get(k, 0.0) for took in starts) for k in keys}
            result.setdefault(recipe, {})[name] = middle
            print(f"{recipe:<18} {name:<5}", *(f"{k} {v:.2f}" for k, v in middle.items()))
    print(f"see {save('start', {**environment(), 'rounds': args.rounds, 'starts': result})}")


if __name__ == "__main__":
    main()

"""Break the mathematics of a step in drawn places; count what `verify` catches in two checkouts.

    pip install cosmic-ray            # in an environment of its own, for `draw`
    python benchmarks/verify_mutants.py draw draws.json --count 200 --seed 1
    python benchmarks/verify_mutants.py run draws.json BEFORE --jobs 2

A draw is one change of a line (see mutations.py) in the files that compute a step and nothing else,
`FILES`, whose text is the same in both checkouts. Each broken tree verifies one small program in
the mode that it trains in: two layers, a weighted loss and a metric on four devices. It is caught
if a row fails, or if anything is raised. Writes `results/verify_mutants.json`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mutations import ROOT, applied, draw

FILES = (
    *(f"core/step/{name}.py" for name in ("update", "accumulate", "loss", "objective")),
    *(f"core/step/{name}.py" for name in ("reduction", "loss_context", "base", "optimizer")),
    *(f"core/modes/{name}.py" for name in ("mapping", "per_replica_sums", "step_builder")),
    *("core/data/share.py", "core/ground/precision.py"),
)
MODES = {"shard_map": 2, "jit": 1}
"""Modes, and the micro-batches of each."""
PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np, optax
jax.config.update("jax_num_cpu_devices", 4)
import replicax as rx

def loss(model, batch, key):
    hidden = jnp.tanh(batch["x"] @ model["in"])
    values = ((hidden @ model["out"])[:, 0] - batch["y"]) ** 2
    return rx.Weighted(values, batch["weight"]), {"hidden": jnp.mean(hidden**2, axis=1)}

draw = np.random.default_rng(0).normal
rows = {"x": draw(size=(64, 3)), "y": draw(size=64), "weight": np.abs(draw(size=64)) + 0.1}
rows = {name: value.astype(np.float32) for name, value in rows.items()}
model = {"in": jnp.asarray(draw(size=(3, 4)), jnp.float32), "out": jnp.ones((4, 1)) / 2}
dp = rx.DataParallel(loss, optax.adam(1e-2), mode=sys.argv[1], accumulate=int(sys.argv[2]))
result = rx.verify(dp, model, rows, batch_size=64, modes=[sys.argv[1]])
print(*(check.case for check in result.failed))
sys.exit(0 if result.ok else 1)
"""
MOST_SECONDS = 240


def verified(tree: Path, mode: str) -> str:
    """Return how the verification of the program ended in a tree: `ok`, `caught` or `endless`."""
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM, mode, str(MODES[mode])]
    try:
        done = subprocess.run(command, env=env, capture_output=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return "endless"
    return "caught" if done.returncode else "ok"


def tried(change: dict[str, Any], checkout: Path, scratch: Path) -> dict[str, str]:
    """Return how each mode ended in a copy of a checkout with one change."""
    tree = Path(tempfile.mkdtemp(dir=scratch))
    try:
        shutil.copytree(checkout / "src", tree / "src")
        path = tree / change["file"]
        found = applied(path.read_text(), change)
        if found is None:
            return dict.fromkeys(MODES, "no such line")
        path.write_text(found[0])
        return {mode: verified(tree, mode) for mode in MODES}
    finally:
        shutil.rmtree(tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["draw", "run"])
    parser.add_argument("draws", type=Path)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.action == "draw":
        wanted = {f"src/replicax/{name}" for name in FILES}
        changes = list(draw(options.count, options.seed, wanted))
        options.draws.write_text(json.dumps(changes, indent=1))
        return
    changes = json.loads(options.draws.read_text())
    checkouts = {"before": options.before.resolve(), "after": ROOT}
    for name, checkout in checkouts.items():
        assert verified(checkout, "jit") == "ok", name
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:

        def both(change: dict[str, Any]) -> dict[str, Any]:
            ended = {n: tried(change, path, Path(folder)) for n, path in checkouts.items()}
            print(change["file"], change["line"], change["after"][:1], ended, flush=True)
            return {**change, **ended}

        results = list(pool.map(both, changes))
    counts = Counter(
        f"{mode}: {each['before'][mode]} before, {each['after'][mode]} after"
        for each in results
        for mode in MODES
    )
    print(*(f"{count:4} {text}" for text, count in sorted(counts.items())), sep="\n")
    from timing import environment, save  # which imports replicax; cosmic-ray has no such place

    save("verify_mutants", {**environment(), "counts": counts, "draws": results})


if __name__ == "__main__":
    main()

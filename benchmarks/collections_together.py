"""Jitter of the steps of two processes with Python's garbage collection, at agreed steps or not.

Each process holds a million small objects, as an index of a data set, and makes some more in each
step that live for the next 300, as a buffer of decoded rows. `together` is `rx.fit` as it is; in
`apart` each process collects when Python's counts say so. Prints the seconds of a step: median,
mean, 99th percentile, largest. Runs alternate.
"""

import argparse
import collections
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from timing import environment, save

STEPS, HELD, MADE, LIVE = 1500, 10**6, 2000, 300
WAYS = "apart", "together"


def process(way: str) -> None:
    """Train in a job of two, and write the seconds of each step in process 0."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import replicax as rx
    from replicax.train.run.host_memory import Garbage

    if way == "apart":
        Garbage.begun = lambda self, step: None  # type: ignore[method-assign]
    job = rx.initialize(verbose=False)
    held = [{"row": [number]} for number in range(HELD // 2)]
    buffer = collections.deque[object](maxlen=LIVE)
    ended: list[float] = []

    class Times(rx.Hook):
        def step(self, run: object, step: object) -> None:
            ended.append(time.perf_counter())

        def dispatched(self, run: object, step: object) -> None:
            more = 1 + 0.3 * job.process  # their counts differ, as their rows do
            buffer.append([{"row": [number]} for number in range(int(more * MADE / 2))])

    def loss(model: dict[str, jnp.ndarray], batch: dict[str, jnp.ndarray], key: object) -> object:
        return jnp.mean((jnp.tanh(batch["x"] @ model["in"]) @ model["out"]) ** 2, axis=-1)

    rows = {"x": np.random.default_rng(0).normal(size=(1024, 256)).astype(np.float32)}
    model = {"in": jnp.ones((256, 512)) / 256, "out": jnp.ones((512, 8)) / 512}
    dp = rx.DataParallel(loss, optax.adam(1e-3), job=job)
    rx.fit(dp, dp.init(model), rows, batch_size=64, steps=STEPS, hooks=[Times()], progress=False)
    assert len(held) == HELD // 2
    if job.process == 0:
        seconds = sorted(b - a for a, b in itertools.pairwise(ended[50:]))
        Path("seconds.json").write_text(json.dumps(seconds))


def measured(way: str) -> list[float]:
    """Return the sorted seconds of the steps of one job."""
    command = [sys.executable, str(Path(__file__).resolve()), "--process", way]
    launch = [sys.executable, "-m", "replicax", "launch", "--processes", "2", "--", *command]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(launch, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        found: list[float] = json.loads((Path(folder) / "seconds.json").read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--process", choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.process:
        process(options.process)
        return
    result: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.rounds):
        for way in WAYS:
            seconds = measured(way)
            figures = {
                "median": statistics.median(seconds),
                "mean": statistics.fmean(seconds),
                "p99": seconds[int(0.99 * len(seconds))],
                "largest": seconds[-1],
            }
            print(way, {key: f"{1e3 * value:.1f} ms" for key, value in figures.items()}, flush=True)
            result[way].append(figures)
    about = {"steps": STEPS, "held": HELD, "made": MADE, "live": LIVE, "processes": 2}
    save("collections_together", {**environment(), **about, "seconds": result})


if __name__ == "__main__":
    main()

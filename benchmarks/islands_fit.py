"""A run of GPT `nano` in one process of a job, or one island, for islands_runs.py.

    python islands_fit.py FOLDER MODE STEPS ROWS SAVE_SECONDS

It saves a checkpoint every so many seconds, and each start writes its own file of times into
FOLDER: a line about the start, then one of each step.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax

import replicax as rx
from replicax.islands.island_job import IslandJob
from replicax.recipes.gpt2 import GPT2
from replicax.train.run.host_memory import keep_freed_memory


def began() -> float:
    """Return when this process was created, in seconds since 1970."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - (up - ticks / os.sysconf("SC_CLK_TCK"))


class Times(rx.Hook):
    """Writes the time of each step, the number of live members, and whether this one writes.

    The line is written once an exchange is complete: after `step` in an island, which waits for it.
    A process of a job, which does not, writes a line when it learns that a step has finished.
    """

    def __init__(self, folder: Path, job: Any) -> None:
        self._islands = isinstance(job, IslandJob)
        number = job.island if self._islands else job.process
        path = folder / f"times-{number}-{os.getpid()}.jsonl"
        self._file = path.open("w", buffering=1, encoding="utf-8")
        about = {"number": number, "pid": os.getpid(), "began": began()}
        self._file.write(json.dumps(about) + "\n")

    def dispatched(self, run: Any, step: Any) -> None:
        if self._islands:
            self._write(run, step, len(run.dp.job.group.agreement.members))

    def step(self, run: Any, step: Any) -> None:
        if not self._islands:
            self._write(run, step, run.dp.job.processes)

    def _write(self, run: Any, step: Any, live: int) -> None:
        line = [time.time(), step.place.step, live, run.is_main]
        self._file.write(json.dumps(line) + "\n")


def main() -> None:
    where, mode, steps, rows, save_seconds = sys.argv[1:]
    folder = Path(where)
    job = rx.initialize()
    times = Times(folder, job)
    keep_freed_memory()
    recipe = GPT2(batch_size=int(rows))
    dp = rx.DataParallel(recipe.loss, recipe.optimizer(), mode=mode, job=job)
    rx.fit(
        dp,
        dp.init(recipe.model(jax.random.key(0))),
        recipe.train_source(),
        batch_size=int(rows),
        steps=int(steps),
        run_dir=folder / "run",
        saving=rx.Saving(minutes=float(save_seconds) / 60),
        hooks=[times],
        progress=False,
    )


if __name__ == "__main__":
    main()

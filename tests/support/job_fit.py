"""`fit` in a job: `STEPS FOLDER INTERRUPTED`; a process prints `{"steps": ..., "rows": ...}`.

With `late` for INTERRUPTED, process 1 sleeps 50 ms in each step, and nothing is evaluated.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
from support.job_cases import DATA, loss, model

import replicax as rx
from replicax.core.ground.job import Job
from replicax.train.run import stragglers


def interrupt(job: Job, steps: int) -> None:
    """Send this process a Ctrl-C after so many steps."""
    while job.in_flight.begun < steps:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


class FailsInProcess1(rx.Hook):
    """Raises at the start, in process 1 only."""

    def start(self, run: Any) -> None:
        if not run.is_main:
            raise KeyError("a mistake")


class Sleeps(rx.Hook):
    """Makes process 1 come late to each step; notes whether Python collects by itself."""

    collects = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def dispatched(self, run: Any, step: Any) -> None:
        time.sleep(self.seconds)
        self.collects = gc.get_threshold()[2] < 10**9


def main() -> None:
    """Steps of this process from `STEPS` (of each process, by commas), Ctrl-C in `INTERRUPTED`."""
    job = rx.initialize(verbose=False)
    steps = [int(number) for number in sys.argv[1].split(",")][job.process]
    if sys.argv[3] == str(job.process):
        threading.Thread(target=interrupt, args=[job, 20], daemon=True).start()
    dp = rx.DataParallel(loss, optax.adamw(1e-3), job=job)
    state = dp.init(model())
    late = sys.argv[3] == "late"
    stragglers._JUDGED_SECONDS = 1.0
    sleeps = Sleeps(0.05 * late * job.process)
    result = rx.fit(
        dp,
        state,
        DATA,
        batch_size=16,
        steps=steps,
        eval_source=None if late else DATA,
        run_dir=Path(sys.argv[2]) / "run",
        log_every=1000,
        hooks=[FailsInProcess1(), sleeps],
        interrupt=rx.types.Interrupt(),
    )
    norm = float(np.linalg.norm(np.asarray(dp.model(result.state)["in"])))
    ended = {"steps": result.steps, "interrupted": result.interrupted, "norm": norm}
    ended["collects"] = sleeps.collects
    print(json.dumps({**ended, **result.metrics}), flush=True)


if __name__ == "__main__":
    main()

"""A user's run on islands, alone too: island_job.py WEIGHTS.npz [process | worker].

The first start of island 1 is killed, itself or with the engine's process that started it. The
others wait for it, between steps, so that it takes part before they are done.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import optax
from train_job import loss, make_model

import replicax as rx

ROWS, EPOCHS, KILLED_AT = 51, 60, 5
JOINED = Path("joined")


def main(path: str, killed: str | None) -> None:
    island = os.environ.get("REPLICAX_ISLAND", "alone")
    starts = Path(f"starts-{island}")
    with starts.open("a") as file:
        print(os.getpid(), file=file)
    first = len(starts.read_text().split()) == 1
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(ROWS, 8)).astype(np.float32)
    source = {"x": x, "y": (x[:, :4] + x[:, 4:]).argmax(axis=1).astype(np.int32)}
    dp = rx.DataParallel(loss, optax.adamw(1e-3), mode="exact", job=rx.initialize())
    state = dp.init(make_model())
    with rx.Run(dp, state, source, batch_size=16, epochs=EPOCHS, run_dir="run") as run:
        for step, batch in enumerate(run):
            run.step(batch)
            if killed and island == "1" and first and step == KILLED_AT:
                os.kill(os.getpid() if killed == "process" else _worker(), signal.SIGKILL)
                time.sleep(60)
            if killed and island == "1" and not first:
                JOINED.touch()
            if killed and not JOINED.exists():
                time.sleep(1.0)
    if run.is_main:
        weights = dp.model(run.state)
        np.savez(path, **{name: np.asarray(value) for name, value in weights.items()})


def _worker() -> int:
    """Return the process that started the guard of this one."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[1])


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[2:] or [None])

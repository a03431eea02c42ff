"""The training of a trial, alone or as one island, in `FOLDER/run`.

With CHAOS_HOSTS each island believes that it is alone on its host. Each start appends the time and
number of each step to a file in `FOLDER/notes`, and one that completes the run writes there what
came of it.
"""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos import jobs
from chaos.islands.sizes import BATCH, EPOCHS, EVAL_ROWS, ROWS, SAVE_EVERY, STEPS_OF_AN_EPOCH
from support.counted_rows import loss, model, optimizer, rows

import replicax as rx
from replicax.islands import group, handshake


class Noting(rx.Hook):
    """Notes each step once it is done, and makes each take longer."""

    def __init__(self, notes: jobs.Notes) -> None:
        self._notes, self._seconds = notes, jobs.step_seconds()

    def before_step(self, run: Any, batch: Any) -> None:
        time.sleep(self._seconds)

    def dispatched(self, run: Any, step: Any) -> None:
        self._notes.step(run.place.step)


def fit(dp: Any, state: Any, rows: Any, eval_rows: Any, notes: jobs.Notes, seed: int) -> Any:
    """Train in the folder of the notes."""
    return jobs.fit(
        *(dp, state, rows, notes.folder, SAVE_EVERY),
        batch_size=BATCH,
        epochs=EPOCHS,
        seed=seed,
        eval_source=eval_rows,
        hooks=[Noting(notes)],
        progress=True,
    )


def train(notes: jobs.Notes) -> None:
    dp = rx.DataParallel(
        loss, optimizer(STEPS_OF_AN_EPOCH), mode="exact", job=rx.initialize(verbose=False)
    )
    state = dp.init(model(ROWS), seed=3)
    result = fit(dp, state, rows(ROWS, seed=2), rows(EVAL_ROWS, seed=5), notes, seed=4)
    notes.write_result(result.state)


def on_hosts_of_their_own() -> None:
    """Let each island believe that it is alone on its host: it cannot tell who is dead."""

    def boot() -> str:
        return f"host of island {os.environ['REPLICAX_ISLAND']}"

    group.boot = handshake.boot = boot


def main(train: Callable[[jobs.Notes], None]) -> None:
    """Train as an island, or alone."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    jobs.configure()
    if os.environ.get("CHAOS_HOSTS"):
        on_hosts_of_their_own()
    name = f"{os.environ.get('REPLICAX_ISLAND', 'alone')}-{os.getpid()}"
    train(jobs.Notes(Path(sys.argv[1]), name))


if __name__ == "__main__":
    main(train)

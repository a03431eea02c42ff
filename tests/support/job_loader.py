"""`fit` in a job on loaders of each process: `FOLDER STOP SEED`; process 1 shuffles by SEED."""

import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
from support.job_cases import DATA, loss, model

import replicax as rx


class Loader:
    """40 batches of 8 rows, drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self.rows = np.random.default_rng(seed).integers(0, len(DATA["x"]), (40, 8))

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for rows in self.rows:
            yield {name: array[rows] for name, array in DATA.items()}


def main() -> None:
    """Train an epoch at most; exits with the code of `fit`."""
    job = rx.initialize(verbose=False)
    folder, stop, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dp = rx.DataParallel(loss, optax.sgd(1e-3), job=job)
    loader = Loader(seed if job.process == 1 else 0)

    class Stop(rx.Hook):
        """Ends the run at a step, as the batch system does."""

        def step(self, run: Any, step: Any) -> None:
            if step.place.step == stop:
                signal.raise_signal(signal.SIGTERM)

    result = rx.fit(
        dp,
        dp.init(model()),
        rx.ProcessLocal(loader),
        epochs=1,
        run_dir=folder,
        hooks=[Stop()],
        progress=False,
    )
    sys.exit(result.exit_code)


if __name__ == "__main__":
    main()

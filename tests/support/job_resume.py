"""`fit` in a job that records the rows of each step: `FOLDER MODE STEPS STOP`; STOP 0 for none.

Process 0 writes `FOLDER/told.jsonl`, an object a step, and `FOLDER/params.npz` at the end.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils
from support.job_cases import DATA, loss, model

import replicax as rx


def watch(told: Any, stop: int) -> None:
    """Write the examples of each step, and stop after one of them."""
    step = rx.DataParallel.step

    def told_step(dp: rx.DataParallel, state: rx.TrainState, batch: Any) -> Any:
        number = int(state.step) + 1
        index, mask = (
            np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
            for leaf in (batch.index, batch.mask)
        )
        if jax.process_index() == 0:
            used = sorted(index[mask > 0].tolist())
            print(json.dumps({"step": number, "examples": used}), file=told, flush=True)
        result = step(dp, state, batch)
        if number == stop:
            signal.raise_signal(signal.SIGTERM)
        return result

    rx.DataParallel.step = told_step  # type: ignore[method-assign]


def main() -> None:
    """Train; `fit` exits with 75 after SIGTERM."""
    job = rx.initialize(verbose=False)
    folder, mode, steps, stop = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dp = rx.DataParallel(loss, optax.adamw(1e-3), mode=mode, job=job)
    state = dp.init(model())
    with (folder / "told.jsonl").open("a") as told:
        watch(told, stop)
        settings: dict[str, Any] = {"batch_size": 16, "steps": steps}
        settings["saving"] = rx.Saving(every=30)
        result = rx.fit(dp, state, DATA, run_dir=folder / "run", progress=False, **settings)
    if jax.process_index() == 0:
        np.savez(folder / "params.npz", **jax.tree.map(np.asarray, dp.model(result.state)))


if __name__ == "__main__":
    main()

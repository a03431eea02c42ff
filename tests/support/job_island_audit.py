"""`fit` with audits in an island: `FOLDER ISLAND`, whose state gets a flipped bit once."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import optax
from support.bit_flips import flip_leaf, leaf_names
from support.job_cases import DATA, loss, model

import replicax as rx
from replicax.cli import _explain
from replicax.cluster.failure import end
from replicax.train.files.fingerprint import sha256

EVERY, STEPS = 10, 200
SLOW_SECONDS = 0.3


class Flip(rx.Hook):
    """Flips a bit just before an audit; then waits, at most 57 s, for the new start of the island.

    The step before was computed from the right weights, so that the run ends as if nothing were.
    """

    def __init__(self, folder: Path, faulty: int) -> None:
        self._faulty = faulty
        self._is_faulty = int(os.environ["REPLICAX_ISLAND"]) == faulty
        self._flipped, self._joined = folder / "flipped", folder / "joined"

    def start(self, run: Any) -> None:
        if self._is_faulty and self._flipped.exists():
            self._joined.touch()

    def dispatched(self, run: Any, step: Any) -> None:
        if self._faulty >= 0 and step.place.step > EVERY and not self._joined.exists():
            time.sleep(SLOW_SECONDS)
        if self._is_faulty and step.place.step == EVERY:
            self._flipped.touch()
            leaf = leaf_names(run.state).index("params['in']")
            run.state = flip_leaf(run.state, leaf, jax.devices()[0], 5, 6)


def main() -> None:
    """Train, and print the checksum of the weights."""
    folder, faulty = Path(sys.argv[1]), int(sys.argv[2])
    dp = rx.DataParallel(loss, optax.adamw(1e-2), job=rx.initialize(verbose=False))
    hooks = [Flip(folder, faulty), rx.hooks.Audit(EVERY)]
    result = rx.fit(
        dp,
        dp.init(model()),
        DATA,
        batch_size=16,
        steps=STEPS,
        hooks=hooks,
        run_dir=folder / "run",
        saving=rx.Saving(every=50),
    )
    print(f"weights {sha256(result.state.params)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except rx.ReplicaxError as error:  # as the command line does
        code = _explain(error)
        end(error, code)
        sys.exit(code)

"""The training of a trial, alone or as one island, in `FOLDER/run`.

The environment has what differs between trials: CHAOS_STEP_SECONDS, CHAOS_SAVE_EVERY, CHAOS_CACHE
and CHAOS_HOSTS. Each start appends the time and number of each step to a file in `FOLDER/notes`,
and one that completes the run writes there what came of it.
"""

import faulthandler
import json
import math
import os
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import numpy as np
from chaos_islands.sizes import BATCH, EPOCHS, EVAL_ROWS, KEEP, ROWS, STEPS_OF_AN_EPOCH
from support.counted_rows import loss, model, optimizer, rows

import replicax as rx
from replicax.islands import group, handshake
from replicax.train.fingerprint import sha256

NOTE = struct.Struct("<dq")
"""Time in seconds since 1970, and number of steps done."""


class Notes(rx.Hook):
    """Keeps notes of this start for the trial, in files named after its island and pid."""

    def __init__(self, folder: Path, seconds: float) -> None:
        base = folder / "notes"
        base.mkdir(exist_ok=True)
        self.base = base / f"{os.environ.get('REPLICAX_ISLAND', 'alone')}-{os.getpid()}"
        self._seconds = seconds
        self._file = os.open(
            self.base.with_suffix(".steps"), os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )

    def before_step(self, run: Any, batch: Any) -> None:
        time.sleep(self._seconds)

    def dispatched(self, run: Any, step: Any) -> None:
        os.write(self._file, NOTE.pack(time.time(), run.place.step))


def train(folder: Path) -> None:
    notes = Notes(folder, float(os.environ.get("CHAOS_STEP_SECONDS", "0")))
    dp = rx.DataParallel(
        loss, optimizer(STEPS_OF_AN_EPOCH), mode="exact", job=rx.initialize(verbose=False)
    )
    state = dp.init(model(ROWS), seed=3)
    result = rx.fit(
        dp,
        state,
        rows(ROWS, seed=2),
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=True,
        seed=4,
        eval_source=rows(EVAL_ROWS, seed=5),
        log_every=1,
        run_dir=folder / "run",
        saving=rx.Saving(every=int(os.environ.get("CHAOS_SAVE_EVERY", "10")), keep=KEEP),
        hooks=[notes],
        progress=True,
    )
    params = result.state.params
    told = {
        "params": sha256(params),
        "state": sha256(result.state),
        "seen": np.asarray(params["seen"]).tolist(),
        "step": int(result.state.step),
    }
    beside = notes.base.with_suffix(".new")
    beside.write_text(json.dumps(told))
    beside.replace(notes.base.with_suffix(".result"))


def on_hosts_of_their_own() -> None:
    """Let each island believe that it is alone on its host: it cannot tell who is dead."""

    def boot() -> str:
        return f"host of island {os.environ['REPLICAX_ISLAND']}"

    group.boot = handshake.boot = boot


def configure() -> None:
    """Configure JAX before it makes devices, with the programs of earlier trials."""
    jax.config.update("jax_platforms", "cpu")
    if cache := os.environ.get("CHAOS_CACHE"):
        jax.config.update("jax_compilation_cache_dir", cache)
        # A killed process would leave a broken entry in the cache.
        least_seconds = 0.0 if "CHAOS_COMPILES" in os.environ else math.inf
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    sys.modules["matplotlib"] = None  # type: ignore[assignment] # as if not installed
    if os.environ.get("CHAOS_HOSTS"):
        on_hosts_of_their_own()


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    configure()
    train(Path(sys.argv[1]))

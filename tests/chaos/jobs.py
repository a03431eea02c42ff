"""Common to the trainings of all trials: notes for the trial, and how JAX is configured.

The environment has what differs between trials: CHAOS_STEP_SECONDS, CHAOS_SAVE_EVERY, CHAOS_CACHE,
CHAOS_COMPILES and more. `tests` is in PYTHONPATH.
"""

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from chaos.trial import STEP

import replicax as rx
from replicax.train.files.fingerprint import sha256


class Notes:
    """Notes about this process for the trial, in files of this name; each step has its time."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self._base = folder, folder / "notes" / name
        self._base.parent.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._steps = os.open(self._base.with_suffix(".steps"), flags)

    def write(self, event: str, **told: Any) -> None:
        """Write a note that readers see whole or not at all."""
        beside = self._base.with_suffix(".new")
        beside.write_text(json.dumps(told))
        beside.replace(self._base.with_suffix(f".{event}"))

    def write_result(self, state: Any) -> None:
        """Note the state of the completed run, which counts its rows."""
        params, step = state.params, int(state.step)
        seen = np.asarray(params["seen"]).tolist()
        self.write("result", params=sha256(params), state=sha256(state), seen=seen, step=step)

    def step(self, number: int) -> None:
        """Note a step; readers see it at once."""
        os.write(self._steps, STEP.pack(time.time(), number))


def step_seconds() -> float:
    """Return the time that each step takes longer."""
    return float(os.environ.get("CHAOS_STEP_SECONDS", "0"))


def fit(dp: Any, state: Any, rows: Any, folder: Path, every: int, **options: Any) -> Any:
    """Train as all trials do, with a checkpoint every so many steps."""
    usual = {"shuffle": True, "log_every": 1, "run_dir": folder / "run"}
    saving = rx.Saving(every=int(os.environ.get("CHAOS_SAVE_EVERY", every)), keep=3)
    return rx.fit(dp, state, rows, saving=saving, **{**usual, **options})


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

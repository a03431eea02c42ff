"""The training of a trial, which proves which rows it used, in `FOLDER`, on `DATA`.

The run is `FOLDER/run`. Each process keeps notes in `FOLDER/notes` of how far it is, and at the
end process 0 writes `FOLDER/result.json`.
"""

import functools
import json
import math
import mmap
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # otherwise `chaos` would be `chaos.py` in this file's folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import jax
import numpy as np
from chaos import defences, failing_writes
from chaos.sizes import (
    BAD_ROW,
    BATCH,
    DATA,
    DEVICES,
    EPOCHS,
    EVAL_ROWS,
    KEEP,
    MAX_BAD_STEPS,
    ROWS,
    SAVE_EVERY,
    STEPS_OF_AN_EPOCH,
)
from jax._src import compiler
from jax._src.distributed import global_state
from support.counted_rows import loss, model, optimizer, rows

import replicax as rx
from replicax.cluster.failure import end
from replicax.core.ground.job import Job
from replicax.errors import Terminated
from replicax.train.fingerprint import sha256


class Notes:
    """Writes notes about this process for the trial, in files named after its pid."""

    def __init__(self, folder: Path) -> None:
        self._base = folder / "notes" / str(os.getpid())
        self._base.parent.mkdir(exist_ok=True)
        self._begun: mmap.mmap | None = None

    def write(self, event: str, **told: Any) -> None:
        path = self._base.with_suffix(f".{event}")
        path.with_suffix(".new").write_text(json.dumps({"time": time.time(), **told}))
        path.with_suffix(".new").replace(path)

    def step(self, number: int) -> None:
        """Note that step `number` has begun; readers see it at once."""
        if self._begun is None:
            with self._base.with_suffix(".step").open("w+b") as file:
                file.write(bytes(8))
                file.flush()
                self._begun = mmap.mmap(file.fileno(), 8)
        self._begun[:] = number.to_bytes(8, "little")


class Fitting(rx.Hook):
    """Notes that `fit` handles signals from now on."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def before_run(self, run: Any) -> None:
        self._notes.write("fitting")


def watch_steps(notes: Notes, seconds: float) -> None:
    """Note the steps of this process, and make each take `seconds` longer."""
    step = rx.DataParallel.step
    begun: list[int] = []

    @functools.wraps(step)
    def noted(self: rx.DataParallel, state: Any, batch: Any) -> Any:
        first = not begun
        if first:
            begun.append(int(state.step))
            notes.write("restored", step=begun[0])
        begun[0] += 1
        notes.step(begun[0])
        after = step(self, state, batch)
        if first:
            jax.block_until_ready(after)
            notes.write("stepped")
        time.sleep(seconds)
        return after

    rx.DataParallel.step = noted  # type: ignore[method-assign]


def source(data: str) -> dict[str, np.ndarray]:
    """Return the rows to train on, with the NaNs that `data` names."""
    taken = rows(ROWS, seed=2)
    bad = {"plain": 0, "nan-one": 1, "nan-all": BATCH}[data]
    taken["x"][BAD_ROW : BAD_ROW + bad] = np.nan
    return taken


def copies(state: Any) -> list[str]:
    """Return a digest of what each device of this process holds, one if all hold everything."""
    held: dict[Any, list[np.ndarray]] = {}
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held.setdefault(shard.device, []).append(np.asarray(shard.data))
    return [sha256(arrays) for arrays in held.values()]


def train(folder: Path, data: str, notes: Notes, job: Job) -> int:
    """Start or continue the run; returns the exit code."""
    dp = rx.DataParallel(loss, optimizer(STEPS_OF_AN_EPOCH), job=job)
    state = dp.init(model(ROWS), seed=3)
    try:
        result = rx.fit(
            dp,
            state,
            source(data),
            batch_size=BATCH,
            epochs=EPOCHS,
            shuffle=data != "nan-all",  # otherwise a batch would arrive in many parts
            seed=4,
            eval_source=rows(EVAL_ROWS, seed=5),
            log_every=1,
            run_dir=folder / "run",
            saving=rx.Saving(every=SAVE_EVERY, keep=KEEP),
            guard=rx.Guard(max_bad_steps=MAX_BAD_STEPS),
            config={"job": "chaos", "data": data},
            hooks=[Fitting(notes)],
        )
    except Terminated as stopped:
        result = stopped.result
    notes.write("fitted", copies=copies(result.state))
    if not result.exit_code and jax.process_index() == 0:
        params = result.state.params
        told = {
            "sha256": sha256(params),
            "state": sha256(result.state),
            "seen": np.asarray(params["seen"]).tolist(),
            "step": int(result.state.step),
        }
        beside = folder / "result.json.new"
        beside.write_text(json.dumps(told))
        beside.replace(folder / "result.json")
    return int(result.exit_code)


def main() -> int:
    """Run the job and return an exit code as the command line does."""
    folder, data = Path(sys.argv[1]), sys.argv[2]
    notes = Notes(folder)
    notes.write("started", process=os.environ["REPLICAX_PROCESS_ID"])
    watch_steps(notes, float(os.environ.get("CHAOS_STEP_SECONDS", "0")))
    failing_writes.install(os.environ.get("CHAOS_FAIL_WRITES", ""))
    defences.switch_off(os.environ.get("CHAOS_WITHOUT", ""))
    try:
        job = rx.initialize(verbose=False)
        notes.write("joined")
        return train(folder, data, notes, job)
    except rx.ReplicaxError as error:
        print(f"replicax: {error}", file=sys.stderr, flush=True)
        end(error, error.exit_code)
        return error.exit_code


def write_in_all_processes() -> None:
    """JAX lets only process 0 write compiled programs, though each process has its own."""
    write = compiler._cache_write

    def writing(*arguments: Any) -> None:
        mine, global_state.process_id = global_state.process_id, 0
        try:
            write(*arguments)
        finally:
            global_state.process_id = mine

    compiler._cache_write = writing  # type: ignore[assignment]


def configure() -> None:
    """Configure JAX before it makes devices: few threads, and the programs of earlier trials."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_platforms", "cpu")
    if cache := os.environ.get("CHAOS_CACHE"):
        jax.config.update("jax_compilation_cache_dir", cache)
        # A killed process would leave a broken entry in the cache.
        compiles = "CHAOS_COMPILES" in os.environ
        least_seconds = 0.0 if compiles else math.inf
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
        if compiles:
            write_in_all_processes()
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if "CHAOS_CURVES" not in os.environ:
        sys.modules["matplotlib"] = None  # type: ignore[assignment] # as if not installed


if __name__ == "__main__":
    configure()
    assert sys.argv[2] in DATA
    sys.exit(main())

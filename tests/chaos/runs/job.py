"""The training of a trial, which proves which rows it used, in `FOLDER`, on `DATA`.

The run is `FOLDER/run`. Each process keeps notes in `FOLDER/notes` of how far it is, and at the
end process 0 writes there what came of it.
"""

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from chaos.jobs import Notes, configure, fit, step_seconds
from chaos.runs import defences, failing_writes
from chaos.runs.sizes import (
    BAD_ROW,
    BATCH,
    DATA,
    DEVICES,
    EPOCHS,
    EVAL_ROWS,
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
from replicax.train.files.fingerprint import sha256


class Fitting(rx.Hook):
    """Notes that `fit` handles signals from now on."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    def before_run(self, run: Any) -> None:
        self._notes.write("fitting")


def watch_steps(notes: Notes) -> None:
    """Note the steps of this process when they begin, and make each take longer."""
    step, seconds = rx.DataParallel.step, step_seconds()
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
            notes.write("stepped", time=time.time())
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
        result = fit(
            dp,
            state,
            source(data),
            folder,
            SAVE_EVERY,
            batch_size=BATCH,
            epochs=EPOCHS,
            shuffle=data != "nan-all",  # otherwise a batch would arrive in many parts
            seed=4,
            eval_source=rows(EVAL_ROWS, seed=5),
            guard=rx.Guard(max_bad_steps=MAX_BAD_STEPS),
            config={"job": "chaos", "data": data},
            hooks=[Fitting(notes)],
        )
    except Terminated as stopped:
        result = stopped.result
    notes.write("fitted", time=time.time(), copies=copies(result.state))
    if not result.exit_code and jax.process_index() == 0:
        notes.write_result(result.state)
    return int(result.exit_code)


def main() -> int:
    """Run the job and return an exit code as the command line does."""
    folder, data = Path(sys.argv[1]), sys.argv[2]
    notes = Notes(folder, str(os.getpid()))
    notes.write("started", process=os.environ["REPLICAX_PROCESS_ID"])
    watch_steps(notes)
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


if __name__ == "__main__":
    configure()
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if "CHAOS_COMPILES" in os.environ:
        write_in_all_processes()
    assert sys.argv[2] in DATA
    sys.exit(main())

"""One process of a job in which one goes wrong: faults_job.py FAULT VICTIM STEP FOLDER."""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

FAULT, VICTIM, STEP, FOLDER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
ME = int(os.environ["REPLICAX_PROCESS_ID"])
WRONG = ME == VICTIM
STEPS = 60
ROWS, BATCH = 160, 24
START_SECONDS = 120.0
ABSENT_SECONDS = 4.0
FOR_EVER = 1000.0

if FAULT == "version" and WRONG:
    jax.__version__ = "0.0.1"

import replicax as rx  # noqa: E402


def went_wrong() -> None:
    (FOLDER / "injected").write_text(repr(time.monotonic()))


def sleeping(values: Any) -> Any:
    """Called inside each step, in each process."""
    sleeping.calls += 1  # type: ignore[attr-defined]
    if WRONG and sleeping.calls == STEP:  # type: ignore[attr-defined]
        went_wrong()
        time.sleep(FOR_EVER)
    return np.zeros_like(values)


sleeping.calls = 0  # type: ignore[attr-defined]


def loss(model: Any, batch: Any, key: Any) -> Any:
    values = (jnp.tanh(batch["x"] @ model["w"]) @ model["v"] - batch["y"]) ** 2
    if FAULT == "callback":
        shape = jax.ShapeDtypeStruct(values.shape, values.dtype)
        slept = jax.pure_callback(sleeping, shape, jax.lax.stop_gradient(values))
        values += rx.independent(slept)  # not called to examine the loss
    return values


def inject() -> None:
    """Inject the fault between two steps."""
    went_wrong()
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "freeze":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif FAULT == "sleep":
        time.sleep(FOR_EVER)
    elif FAULT == "leave":
        sys.exit(0)
    elif FAULT == "error":
        raise ValueError("bad value")


def wait_for_intruders() -> None:
    """Stand still until the intruders have tried to join."""
    (FOLDER / f"waiting-{ME}").touch()
    while not (FOLDER / "go-on").exists():
        time.sleep(0.01)


def digest(model: Any) -> str:
    leaves = jax.tree.leaves(model)
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def main() -> None:
    timeout_seconds = ABSENT_SECONDS if FAULT == "absent" else START_SECONDS
    job = rx.initialize(timeout_seconds=timeout_seconds)
    numbers = np.random.default_rng(0)
    model = {
        "w": numbers.normal(size=(8, 16)).astype(np.float32),
        "v": numbers.normal(size=16).astype(np.float32),
    }
    source = {
        "x": numbers.normal(size=(ROWS, 8)).astype(np.float32),
        "y": numbers.normal(size=ROWS).astype(np.float32),
    }
    rate = 1e-2 if FAULT == "learning-rate" and WRONG else 1e-3
    dp = rx.DataParallel(loss, optax.adamw(rate), mode="shard_map", job=job)
    state = dp.init(model)
    if FAULT == "steps":
        (FOLDER / f"ready-{ME}").touch()
        rx.fit(dp, state, source, batch_size=BATCH, steps=STEPS + WRONG, progress=False)
    done = 0
    for epoch in range(10_000):
        for batch in dp.feed(source, BATCH * (1 + (FAULT == "batch" and WRONG)), epoch=epoch):
            if done == STEP and FAULT in ("kill", "freeze", "sleep", "leave", "error") and WRONG:
                inject()
            if done == STEP and FAULT == "intruders":
                wait_for_intruders()
            state, _ = dp.step(state, batch)
            done += 1
            (FOLDER / f"stepped-{ME}").touch()
            if done == STEPS and FAULT in ("intruders", "none"):
                print(digest(dp.model(state)), flush=True)
                return


if __name__ == "__main__":
    main()

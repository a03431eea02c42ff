"""Runs in an object store that are killed at an operation of the store, and restarted.

`FOLDER AT...` prints the result of a run without a store, and then for each AT that of a run whose
first two starts were killed right before their operation number AT.
"""

import json
import math
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support import object_store
from support.resumable import bits, told, untimed

import replicax as rx
from replicax.train.hooks import curves

URL = "s3://bucket/runs/x"
EPOCHS, BATCH, SAVE_EVERY = 2, 16, 3
ROWS = {"x": np.linspace(-1, 1, 75 * 4, dtype=np.float32).reshape(75, 4)}


class Mortal(object_store.Objects):
    """Kills this process before its operation number `at`; 0 for never."""

    at = done = 0

    def changes(self) -> None:
        """Another object is about to be written or removed."""
        Mortal.done += 1
        if Mortal.done == Mortal.at:
            os.kill(os.getpid(), signal.SIGKILL)


def loss(model: Any, batch: Any, key: Any) -> Any:
    """The loss of a regression whose inputs are disturbed while it is trained."""
    x = batch["x"]
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.8, x.shape[1:])
    return jnp.sum((x @ model["w"] - jnp.sin(3 * x)) ** 2, axis=-1)


def run(objects: Path | None, at: int) -> dict[str, Any]:
    """The result of the run: without a store, or in one that kills it."""
    Mortal.at = at
    curves.start_drawing = lambda *_, **__: None  # type: ignore[assignment, return-value]  # it knows no such store
    settings: dict[str, Any] = {}
    if objects is not None:
        object_store.register(objects, Mortal)
        saving = rx.Saving(every=SAVE_EVERY, keep=1)
        settings = {"run_dir": URL, "saving": saving, "hooks": [rx.hooks.KeepBest("loss")]}
    dp = rx.DataParallel(loss, optax.sgd(0.1), mode="single")
    state = dp.init({"w": jnp.eye(4)})
    settings |= {"epochs": EPOCHS, "batch_size": BATCH, "log_every": 2, "eval_source": ROWS}
    result = rx.fit(dp, state, ROWS, progress=False, **settings)
    found = {"bits": {name: data.hex() for name, data in bits(result.state).items()}}
    found |= {"told": told(result.records), "written": told(result.records)}
    if objects is not None:
        written = (objects / "bucket%2Fruns%2Fx%2Frecords.jsonl").read_text().splitlines()
        found["written"] = untimed(written)
    return found


def in_child(objects: Path | None, at: int) -> None:
    """Run in another process, and return its result if nothing kills it."""
    sys.stdout.flush()
    child = os.fork()  # JAX has no threads before its first device
    if child:
        os.waitpid(child, 0)
        return
    try:
        found = run(objects, at)
        if not at:
            print(json.dumps(found), flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def main() -> None:
    folder = Path(sys.argv[1])
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    in_child(None, 0)
    # A killed process would leave a broken entry in the cache.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    for at in map(int, sys.argv[2:]):
        (folder / str(at)).mkdir(parents=True)
        for kill_at in (at, at, 0):
            in_child(folder / str(at), kill_at)


if __name__ == "__main__":
    main()

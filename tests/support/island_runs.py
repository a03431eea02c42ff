"""Runs of islands, each in a thread of this process, on a device of its own."""

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
from replicax.cluster.cluster_job import Lone
from replicax.cluster.place import find_place
from replicax.cluster.watchdog import Timeouts
from replicax.islands.group import Group
from replicax.islands.island_job import IslandJob
from replicax.islands.island_place import IslandPlace
from replicax.train.fingerprint import sha256

ROWS, BATCH, EPOCHS = 64, 16, 10
STEPS = EPOCHS * ROWS // BATCH
RNG = np.random.default_rng(0)
SOURCE = {
    "x": RNG.normal(size=(ROWS, 8)).astype(np.float32),
    "y": RNG.normal(size=(ROWS, 8)).astype(np.float32),
}
WEIGHTS = RNG.normal(size=(8, 8)).astype(np.float32)


def squared(model: Any, batch: Any, key: Any) -> Any:
    return ((jnp.tanh(batch["x"] @ model["w"]) - batch["y"]) ** 2).mean(-1)


class Killed(Exception):  # noqa: N818
    """Ends the thread of an island as a signal would end a process."""


class At(rx.Hook):
    """Calls `act` before a step; from then on, sleeps before each, so that islands can join."""

    def __init__(self, step: int, act: Callable[[], None]) -> None:
        self._step, self._act = step, act

    def before_step(self, run: Any, batch: Any) -> None:
        if run.place.step == self._step:
            self._act()
        if run.place.step > self._step:
            time.sleep(0.03)


class Island:
    """An island in a thread of this process, on one device."""

    def __init__(
        self,
        place: IslandPlace,
        *,
        mode: str = "exact",
        rounds: rx.Islands | None = None,
        **settings: Any,
    ) -> None:
        self.place, self.mode, self.rounds, self.settings = place, mode, rounds, settings
        self.result: rx.Fit | None = None
        self.error: BaseException | None = None
        self.job: IslandJob
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def dp(self, job: Any) -> rx.DataParallel:
        mesh = rx.make_mesh(devices=[jax.devices()[self.place.index]])
        return rx.DataParallel(
            squared,
            optax.adam(0.05),
            mode=self.mode,
            mesh=mesh,
            job=job,
            islands=self.rounds,
        )

    def die(self) -> None:
        """End the connections without a word, and the thread."""
        self.job.group.network.close()
        raise Killed

    def _run(self) -> None:
        try:
            lone = Lone(find_place({}))
            self.job = IslandJob(lone, self.place, Group(self.place, Timeouts(silent_seconds=5.0)))
            self.ready.set()
            dp = self.dp(self.job)
            weights = self.settings.pop("weights", WEIGHTS)
            state = dp.init({"w": jnp.asarray(weights)})
            options: dict[str, Any] = {"epochs": EPOCHS, "log_every": 5, "progress": False}
            source = self.settings.pop("source", None)
            if source is None:
                options["batch_size"], source = BATCH, SOURCE
            self.result = rx.fit(dp, state, source, **options, **self.settings)
        except BaseException as error:
            self.error = error
        finally:
            if not isinstance(self.error, Killed):
                self.job.finish()

    def join(self) -> "Island":
        self.thread.join(60.0)
        assert not self.thread.is_alive()
        return self

    def bits(self) -> str:
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return sha256(self.result.state.params)

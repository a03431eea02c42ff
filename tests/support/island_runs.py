"""Runs of islands, each in a thread of this process, on a device of its own."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.island_networks import places
from support.waiting import until

import replicax as rx
from replicax.cluster.cluster_job import Lone
from replicax.cluster.place import find_place
from replicax.cluster.watchdog import Timeouts
from replicax.islands.group import Group
from replicax.islands.island_job import IslandJob
from replicax.islands.island_place import IslandPlace
from replicax.train.files.fingerprint import sha256

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
        rounds: rx.Rounds | None = None,
        rate: float = 0.05,
        **settings: Any,
    ) -> None:
        self.place, self.mode, self.rounds, self.rate = place, mode, rounds, rate
        self.settings = settings
        self.result: rx.types.Fit | None = None
        self.error: BaseException | None = None
        self.job: IslandJob
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def dp(self, job: Any) -> rx.DataParallel:
        mesh = rx.make_mesh(devices=[jax.devices()[self.place.index]])
        return rx.DataParallel(
            squared,
            optax.adam(self.rate),
            mode=self.mode,
            mesh=mesh,
            job=job,
            rounds=self.rounds,
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


def started(
    count: int, hooks: Mapping[int, list[rx.Hook]] | None = None, **settings: Any
) -> list[Island]:
    """Return islands that run, some with hooks of their own."""
    own = hooks or {}
    return [Island(place, hooks=own.get(place.index, []), **settings) for place in places(count)]


def with_one_that_dies(count: int, dying: int, step: int, **settings: Any) -> list[Island]:
    """Return islands that run, one of which dies before a step."""
    islands: list[Island] = []
    islands += started(count, {dying: [At(step, lambda: islands[dying].die())]}, **settings)
    return islands


def with_one_that_comes_back(dying: int, step: int, **settings: Any) -> list[Island]:
    """Return the ends of three islands, one of which dies before step 3 and comes back; it is last.

    Island 1 starts it again before `step`, and all wait until it asks to join.
    """
    islands: list[Island] = []
    back: list[Island] = []

    def others() -> list[Island]:
        return [island for island in islands if island.place.index != dying]

    def wait_for_it() -> None:
        back.append(Island(islands[dying].place, **settings))
        for island in others():
            until(lambda group=island.job.group: dying in group._candidates, 60.0)

    hooks: dict[int, list[rx.Hook]] = {
        1: [At(step, wait_for_it)],
        dying: [At(3, lambda: islands[dying].die())],
    }
    islands += started(3, hooks, **settings)
    ended = [island.join() for island in others()]
    return [*ended, *(island.join() for island in back)]

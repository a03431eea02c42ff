"""The islands of a run: one of them writes, and new ones receive the state at a step.

The job of a run computes its steps; the job of all its islands agrees on when to stop, save and
evaluate. Without islands, these are the same job, and nothing here happens.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from replicax.cluster.alike import processor
from replicax.core.data.feed import Feed
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.job import Job
from replicax.core.ground.leaves import numbers, whole_on_host
from replicax.core.ground.train_state import TrainState, was_donated
from replicax.core.placement.layout import copied
from replicax.errors import ConfigError, IslandLeftError
from replicax.islands.group_changes import ReceivedState
from replicax.islands.island_job import IslandJob
from replicax.text.wording import counted, listed
from replicax.train.checkpoints.arrays import as_key
from replicax.train.checkpoints.manifest import Position
from replicax.train.files.fingerprint import sha256
from replicax.train.files.records import ISLANDS_KIND, Record, record_from_json
from replicax.train.run.stopping import Interrupt, Stopping
from replicax.train.run.stragglers import NO_TIMES, VoteTimes


@dataclasses.dataclass(frozen=True)
class GivenRun:
    """A run and its state, as a member gave them to this island."""

    position: Position
    extra: dict[str, Any]
    records: list[Record]
    votes: dict[str, Any]
    """State of the run's `Stopping`."""
    begins: bool
    """Whether the whole group begins, so that all take the first vote."""
    arrays: list[np.ndarray]

    def state(self, like: TrainState) -> TrainState:
        """Return the state, placed like `like`."""
        leaves, structure = jax.tree.flatten(like)
        placed = [_placed(*pair) for pair in zip(leaves, self.arrays, strict=True)]
        state: TrainState = jax.tree.unflatten(structure, placed)
        return state


class Members:
    """The islands of a run, if it has any.

    `stops` tells whether to give up joining them, `is_over` whether the run needs none of them.
    """

    def __init__(self, job: Job, stops: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        self._islands = job if isinstance(job, IslandJob) else None
        self._group = None if self._islands is None else self._islands.group
        if self._group is not None:
            self._group.stops, self._group.is_over = stops, is_over
        self.everyone: Any = job if self._islands is None else self._islands.everyone
        """The job of all islands; without islands, the run's own."""
        self.given: GivenRun | None = None
        """The run, if another island gave it to this one."""

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return bool(self.everyone.process == 0)

    @property
    def has_islands(self) -> bool:
        return self._islands is not None

    @property
    def island(self) -> int | None:
        """Index of this island, if there are several."""
        return None if self._islands is None else self._islands.island

    @property
    def follows(self) -> bool:
        """Whether another island writes the folder of the run."""
        return self._islands is not None and self._islands.rank != 0

    @property
    def speaks(self) -> bool:
        """Whether this process shows the progress of the run, if it is asked to."""
        if self._islands is None:
            return bool(self.everyone.process == 0)
        return self._islands.island == 0 and self._islands.process == 0

    def stopping(
        self,
        interrupt: Interrupt,
        save_every_seconds: float | None,
        at_boundary: Callable[[], bool],
        times: VoteTimes,
    ) -> Stopping:
        """Return what turns the requests of all processes into decisions.

        `at_boundary` says whether a run with rounds is between two of them; `times` travel with the
        votes of processes that wait for one another in each step.
        """
        islands = None if self._islands is None else self._islands.everyone
        return Stopping(
            interrupt,
            self.everyone,
            save_every_seconds,
            islands=islands,
            at_boundary=at_boundary,
            times=times if islands is None else NO_TIMES,
        )

    def enter(
        self, fields: dict[str, Any], dp: DataParallel, state: TrainState, feed: Feed
    ) -> None:
        """Become a member, once the step is compiled; perhaps receive the run.

        `fields` are those that must be equal in all islands; `feed` begins with a usual batch.
        """
        if self._islands is None:
            return
        if not feed.source.can_repeat:
            raise ConfigError(
                "islands with an iterator of batches, which cannot go back to the batch at which "
                "an island joins; use a list, a loader that can be iterated again, or arrays"
            )
        batch = next(iter(feed))
        if not was_donated(state):
            fields = {**fields, "weights": sha256(state.params)[:16]}
            with self._islands.dry_run():
                dp.step(copied(state), batch)  # compiles all that a step runs
        programs = dp.program(state).step.compiled(state, batch)
        if dp.mode.bitwise:
            digests = {each.name: each.digest[:16] for each in programs}
            fields = {**fields, "processor": processor(), "bits": digests}
        if self._islands.rank >= 0:  # an earlier run of this program
            if self._group is not None:
                self._group.admits = False  # who starts anew begins with the first run
            self.everyone.agree("the run", fields)
            return
        received = self._islands.enter(fields, _most_bytes(state))
        if received is not None:
            self.given = _given(received)

    def give(
        self,
        state: TrainState,
        saved: tuple[Position, dict[str, Any]],
        records: list[Record],
        votes: dict[str, Any],
        *,
        begins: bool = False,
    ) -> None:
        """Give the run to the new members; `saved` is the position and the rest of its state."""
        position, extra = saved
        run = {
            "position": dataclasses.asdict(position),
            "extra": extra,
            "records": [record.to_json() for record in records],
            "votes": votes,
            "begins": begins,
        }
        # Copied, as they are sent while the next step reuses the memory of the state.
        arrays = [np.array(whole_on_host(numbers(leaf))) for leaf in jax.tree.leaves(state)]
        if self._group is not None:
            self._group.give(run, arrays)

    @property
    def newcomers(self) -> list[int]:
        """The islands to which this one has to give the run now."""
        return [] if self._islands is None else self._islands.newcomers

    def all_saved(self, saved: bool) -> bool:
        """Return whether an island has saved the end of the run; all must call it."""
        if self._islands is None:
            return True
        return any(self.everyone.gather("the end of the run", saved, slow=True))

    def arbitrate(self, arbiter: Callable[[bool], bool]) -> None:
        """Let the lease of the run decide whether the islands that are left go on.

        `arbiter` is told whether those that were lost are gone, and not only out of reach.
        """
        if self._group is not None:
            self._group.arbiter = arbiter

    def changes(self, step: int, epoch: int) -> list[tuple[Record, str]]:
        """Return a record and a line for each change of the group since the last call."""
        if self._islands is None or not (changes := self._islands.changes):
            return []
        self._islands.changes, entries = [], []
        for change in changes:
            joined, left = len(change.joined), len(change.left)
            numbers_of = {"live": len(change.members), "joined": joined, "left": left}
            seconds = max(time.time() - change.time, 0.0)
            record = Record(ISLANDS_KIND, step, epoch, dict(numbers_of), 0, seconds)
            parts = [f"{_named(change.joined)} joined"] if joined else []
            parts += [f"lost {change.why}"] if left else []
            line = f"{'; '.join(parts)} · {counted(len(change.members), 'island')}"
            entries.append((record, f"islands at step {step:,}: {line}"))
        return entries

    def delayed_seconds(self) -> float:
        """Return what changes of the group have cost, in time, since the last call."""
        if self._islands is None:
            return 0.0
        seconds, self._islands.delayed_seconds = self._islands.delayed_seconds, 0.0
        return seconds

    def leave(self, why: str) -> None:
        """Leave the others, which go on."""
        assert self._islands is not None
        self._islands.finish()
        raise IslandLeftError(f"island {self._islands.island} left the others: {why}")


def _named(islands: Any) -> str:
    return listed([f"island {index}" for index in islands])


def _given(received: ReceivedState) -> GivenRun:
    run = received.run
    return GivenRun(
        Position(**run["position"]),
        run["extra"],
        [record_from_json(text) for text in run["records"]],
        run["votes"],
        run["begins"],
        received.arrays,
    )


def _placed(like: jax.Array, array: np.ndarray) -> jax.Array:
    wanted = jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=like.sharding)
    data = jax.make_array_from_callback(
        array.shape, like.sharding, lambda index: array[index].copy()
    )
    return as_key(data, wanted)


def _most_bytes(state: TrainState) -> int:
    """Return the most bytes that a frame has: the state, sums as large as parameters, and more.

    Rows that are gathered in mode `exact`, and the history of a run, have no limit.
    """
    return (1 << 30) + 16 * sum(int(numbers(leaf).nbytes) for leaf in jax.tree.leaves(state))

"""The job of one island, and the job of all islands together."""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from replicax.cluster.alike import compared_environment
from replicax.cluster.cluster_job import ClusterJob, as_plain_fields
from replicax.cluster.differences import field_differences, first_of
from replicax.core.ground.job import Parts, Peers, Value
from replicax.core.ground.leaves import PyTree, checksum_here
from replicax.errors import AgreementError, DivergedError, IslandLeftError
from replicax.islands.group import Group
from replicax.islands.group_changes import GroupChange, ReceivedState
from replicax.islands.island_place import IslandPlace
from replicax.islands.local_arrays import NOTHING, LocalArrays
from replicax.islands.messages import View
from replicax.islands.shared_parts import (
    LeadingParts,
    fail_followers,
    follow_first,
    shared_lists,
    shared_state,
)

_LONGEST_FACT = 4_096
"""Characters of JSON of which an island tells more than a digest."""


class IslandJob:
    """A job that computes parts of each batch together with other islands.

    Its processes are those of this island, of which the first alone has the `group`. `everyone` is
    the job of all islands.
    """

    def __init__(self, inner: ClusterJob, place: IslandPlace, group: Group | None) -> None:
        self.inner, self.group = inner, group
        self.island, self.count = place.index, len(place.addresses)
        self.rank = -1
        """Rank of this island among those that completed the last exchange, from 0."""
        self._span = -1, 0
        self.newcomers: list[int] = []
        """Islands that this one has to give the state, before its next exchange."""
        self.changes: list[GroupChange] = []
        """Changes of the group that nobody has taken yet."""
        self.delayed_seconds = 0.0
        """Seconds by which exchanges took longer than usual because of these changes."""
        self.place, self.process, self.processes = inner.place, inner.process, inner.processes
        self.in_flight = inner.in_flight
        self.facts: dict[str, Any] = {}
        """By topic, what all islands must agree on before they exchange anything."""
        self._compared: dict[str, str] = {}
        self._is_dry = False
        self._background = ThreadPoolExecutor(1, "replicax-island-round")
        self._under_way: Future[Any] | None = None
        self.gather, self.broadcast = inner.gather, inner.broadcast
        self.barrier, self.unique = inner.barrier, inner.unique
        self.everyone = AllIslands(self)

    @property
    def peers(self) -> Self:
        """The job itself, which has what only islands have."""
        return self

    def agree(self, topic: str, fields: Mapping[str, Any]) -> None:
        self.inner.agree(topic, fields)
        plain = as_plain_fields(fields)
        text = json.dumps(plain, sort_keys=True)
        self.facts[topic] = plain if len(text) < _LONGEST_FACT else _digest(text)

    def agree_on_text(self, topic: str, text: str) -> None:
        self.inner.agree_on_text(topic, text)
        self.facts[f"the program of {topic}"] = _digest(text)

    def compare(self, about: str, arrays: PyTree) -> None:
        if self.group is not None and not self._is_dry:
            self._compared[about] = checksum_here(arrays)

    def take_compared(self) -> dict[str, str]:
        """Return the checksums that were not compared yet, by name."""
        checksums, self._compared = self._compared, {}
        return checksums

    def move(self) -> None:
        self.inner.move()
        if self.group is not None:
            self.group.move()

    def rest(self) -> None:
        self.inner.rest()
        if self.group is not None:
            self.group.rest()

    @contextlib.contextmanager
    def dry_run(self) -> Iterator[None]:
        """Enter a context in which this island computes one part, and takes it for all others."""
        self._is_dry = True
        try:
            yield
        finally:
            self._is_dry = False

    def exchange(self, parts: Parts[Value], /) -> list[Value]:
        self._settle()
        if self._is_dry:
            arrays = parts.to_host(parts.compute(0))
            values = [parts.from_host(arrays) for _ in range(parts.count)]
            return values if parts.add is None else [functools.reduce(parts.add, values)]
        if self.group is None:
            values, status = follow_first(parts, self.inner)
            self._take(status)
            return values
        try:
            self._enter_own_loop({"parts": parts.count})
            same = self.take_compared()
            if self.processes == 1:
                values, _ = self.group.exchange(parts, same=same)
                self.status()
            else:
                leading = functools.partial(LeadingParts, job=self.inner, told=self.status)
                values, _ = self.group.exchange(parts, same=same, own_parts=leading)
        except (AgreementError, IslandLeftError) as error:  # others are raised in all processes
            fail_followers(error, self.inner)
            raise
        return values

    def _enter_own_loop(self, fields: Mapping[str, Any]) -> None:
        """Become a member in a loop of the user's own, in which no run did so before."""
        assert self.group is not None
        if self.group.agreement.view is None:
            self.group.enter({**self._alike(), **fields}, has_state=True)

    def _alike(self) -> dict[str, Any]:
        """Return what this island has to have in common with the others."""
        return {"environment": compared_environment(os.environ), "facts": self.facts}

    @property
    def span(self) -> tuple[int, int]:
        if self._is_dry:
            return 0, self.count
        if self.rank < 0:

            def find() -> dict[str, Any]:
                self._enter_own_loop({})
                return self.status()

            self.on_leader("the group of islands", find)
        return self._span

    def share(
        self, arrays: list[np.ndarray], *, later: bool = False
    ) -> Callable[[], list[list[np.ndarray]]]:
        if self._is_dry:
            return lambda: [arrays]
        lists: list[list[np.ndarray]] | None = None
        same = self.take_compared()

        def find() -> dict[str, Any]:
            nonlocal lists
            assert self.group is not None
            lists, _ = self.group.exchange(
                NOTHING, same=same, topic="a round", own_parts=lambda *_: LocalArrays(arrays)
            )
            view = self.group.agreement.complete
            assert view is not None
            _check_finite(lists, view)
            return self.status()

        def shared() -> list[list[np.ndarray]]:
            self.on_leader("a round", find)
            return lists or [] if self.processes == 1 else shared_lists(lists, self.inner)

        if not later:
            return shared
        self._settle()
        self._under_way = self._background.submit(find)

        def settled() -> list[list[np.ndarray]]:
            assert self._under_way is not None
            self._under_way.result()
            return lists or []

        return settled

    def _settle(self) -> None:
        """Wait for an exchange in the background: all make the same ones in the same order."""
        if self._under_way is not None:
            wait([self._under_way])

    def enter(self, fields: Mapping[str, Any], most_bytes: int) -> ReceivedState | None:
        """Become a member; return the state that another island gives, if one does.

        The arrays that others send have at most `most_bytes`. Raises what `Group.enter` does.
        """
        received: ReceivedState | None = None

        def find() -> dict[str, Any]:
            nonlocal received
            assert self.group is not None
            self.group.most_bytes = most_bytes
            received = self.group.enter({**self._alike(), **fields})
            self._compared = {}  # who joins has computed nothing since
            return self.status()

        self.on_leader("the group of islands", find)
        return received if self.processes == 1 else shared_state(received, self.inner)

    def on_leader(self, topic: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return in all processes what `find`, which may wait for other islands, does in the first.

        It has to contain what `status` returns.
        """
        self._settle()
        self.inner.rest()
        status: dict[str, Any] = self.inner.broadcast(topic, find)
        self.inner.move()
        if self.group is None:
            self._take(status)
        return status

    def status(self) -> dict[str, Any]:
        """Note in the first process where this island stands, and return it for the others."""
        group = self.group
        assert group is not None
        status = {
            "rank": group.agreement.rank,
            "span": group.agreement.span,
            "newcomers": group.newcomers,
            "changes": [dataclasses.asdict(change) for change in group.taken_changes()],
            "delayed_seconds": group.pace.delayed_seconds,
        }
        group.pace.delayed_seconds = 0.0
        self._take(status)
        return status

    def _take(self, status: Mapping[str, Any]) -> None:
        self.rank, self.newcomers = status["rank"], status["newcomers"]
        self._span = status["span"][0], status["span"][1]
        self.changes += [GroupChange(**change) for change in status["changes"]]
        self.delayed_seconds += status["delayed_seconds"]

    def finish(self) -> None:
        """Leave the others, as the run is complete or failed."""
        self._background.shutdown(wait=False)  # it may wait for an exchange, which `finish` ends
        if self.group is not None:
            self.group.finish()


def _check_finite(arrays: list[list[np.ndarray]], view: View) -> None:
    for (island, _), each in zip(view.members, arrays, strict=True):
        floats = [array for array in each if jnp.issubdtype(array.dtype, jnp.inexact)]
        if not all(np.isfinite(array).all() for array in floats):
            raise DivergedError(
                f"island {island} sent numbers that are not finite, which would reach all: its "
                "parameters or its loss diverged: lower the learning rate, or clip the gradient"
            )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class AllIslands:
    """The processes of all islands as a job: `process` is the rank among those that live."""

    peers: Peers | None = None

    def __init__(self, job: IslandJob) -> None:
        self._job = job
        self.processes = job.count * job.processes
        self.in_flight, self.unique = job.in_flight, job.unique
        self.move, self.rest = job.move, job.rest

    @property
    def process(self) -> int:
        job = self._job
        return -1 if job.rank < 0 else job.rank * job.processes + job.process

    def gather(
        self,
        topic: str,
        value: Any,
        *,
        slow: bool = False,
        cancelled: Callable[[], bool] | None = None,
        admits: bool = False,
    ) -> list[Any]:
        """All-gather; if it `admits` them, islands that asked to join are members afterwards."""
        job = self._job
        notes = job.gather(topic, value, slow=slow)

        def find() -> dict[str, Any]:
            assert job.group is not None
            options: dict[str, Any] = {"topic": topic, "slow": slow, "admits": admits}
            options["same"] = job.take_compared()
            _, notes_of = job.group.exchange(NOTHING, notes, **options)
            return {"values": list(itertools.chain(*notes_of)), **job.status()}

        values: list[Any] = job.on_leader(f"{topic} of all islands", find)["values"]
        return values

    def by_island(self, values: list[Any]) -> list[list[Any]]:
        """Return what the processes of each island gave, by rank."""
        each = self._job.processes
        return [values[first : first + each] for first in range(0, len(values), each)]

    @property
    def rank(self) -> int:
        """Rank of this island."""
        return self._job.rank

    def agree(self, topic: str, fields: Mapping[str, Any]) -> None:
        if differences := field_differences(self.gather(topic, dict(fields))):
            raise AgreementError(
                f"the islands disagree on {topic}: {first_of(differences)}: "
                "start all with the same code, data and arguments"
            )

    def agree_on_text(self, topic: str, text: str) -> None:
        self.agree(topic, {"text": text})

    def broadcast(self, topic: str, find: Callable[[], Any]) -> Any:
        return self.gather(topic, find() if self.process == 0 else None, slow=True)[0]

    def barrier(self, topic: str) -> None:
        self.gather(topic, None)

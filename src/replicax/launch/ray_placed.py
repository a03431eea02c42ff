"""Processes and islands on a Ray cluster: each in its own bundle of resources."""

import dataclasses
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from replicax.islands.island_variables import ISLAND, ISLANDS
from replicax.launch.attempt import Attempt, Conclusion
from replicax.launch.cause import Restarts
from replicax.launch.event_loop import EventLoop
from replicax.launch.island_supervisor import Island, IslandSupervisor
from replicax.launch.job_spec import JobSpec
from replicax.launch.process import ProcessStart, free_port
from replicax.launch.ray_actors import Bundles, RayProcess, forwarded
from replicax.launch.supervisor import run_with_restarts
from replicax.net.address import join_address

_NOWHERE = Path(os.devnull)
"""The log and the report of a process whose node has them."""


class PlacedProcesses:
    """The bundles of the processes of a job, which restarts as a whole.

    Each attempt has new actors, a new secret, and a new address of process 0.

    Raises:
        ray.exceptions.RayError: the processes cannot be placed.
    """

    def __init__(self, ray: ModuleType, job: JobSpec, takes: Mapping[str, int]) -> None:
        self.ray, self._job, self._env = ray, job, forwarded(os.environ)
        self._bundles = Bundles(ray, takes, job.processes, "PACK")
        self._actors: list[Any] = []

    def supervise(self, loop: EventLoop) -> Conclusion:
        """Run the job to its end, restarts included."""
        restarts = Restarts(self._job.restarts)
        return run_with_restarts(lambda _: self._attempt(loop), restarts, loop)[0]

    def _attempt(self, loop: EventLoop) -> Attempt:
        everyone = range(self._job.processes)
        self._actors = [self._bundles.actor(number) for number in everyone]
        self._address = self._actors[0].address.remote(0, 1)
        shared = secrets.token_hex(8), secrets.token_urlsafe(), self._env, _NOWHERE, _NOWHERE
        starts = [ProcessStart(self._job, number, "", *shared) for number in everyone]
        return Attempt(starts, loop, lambda start, _: RayProcess(self, start, start.number))

    def begin(self, number: int) -> tuple[Any, Any]:
        # All wait for the one address: no process starts before process 0 has a node.
        return self._actors[number], self._address

    def run(self, actor: Any, start: ProcessStart, number: int, address: str | None) -> Any:
        assert address is not None
        return actor.run.remote(dataclasses.replace(start, coordinator=address), os.getcwd())


class PlacedIslands:
    """The islands' bundles, addresses and actors; it returns once each has a node.

    Raises:
        ray.exceptions.RayError: an actor cannot be started.
    """

    def __init__(self, ray: ModuleType, job: JobSpec, takes: Mapping[str, int]) -> None:
        self.ray, self._job = ray, job
        self._job_id, self._secret = secrets.token_hex(8), secrets.token_urlsafe()
        self._env, islands = forwarded(os.environ), job.islands or 0
        self._bundles = Bundles(ray, takes, islands, "SPREAD")
        self._first = {number: self._bundles.actor(number) for number in range(islands)}
        asked = [actor.address.remote(number, islands) for number, actor in self._first.items()]
        self._addresses: list[str] = ray.get(asked)

    def supervise(self, loop: EventLoop) -> Conclusion:
        """Run the islands to their end, by the rules of islands on one host."""
        islands = [
            Island(number, self._attempts(number, loop), loop)
            for number in range(len(self._addresses))
        ]
        return IslandSupervisor(islands, self._job.restarts, loop).run()

    def _attempts(self, number: int, loop: EventLoop) -> Callable[[int], Attempt]:
        secret = self._job_id, self._secret
        start = ProcessStart(self._job, 0, "", *secret, {}, _NOWHERE, _NOWHERE, row=number)
        return lambda _: Attempt([start], loop, lambda start, _: RayProcess(self, start, number))

    def begin(self, number: int) -> tuple[Any, Any]:
        """Return an actor and its address, as `PlacedParts.begin`; the first ones are known."""
        if number in self._first:
            return self._first.pop(number), None
        actor = self._bundles.actor(number)
        return actor, actor.address.remote(number, len(self._addresses))

    def run(self, actor: Any, start: ProcessStart, number: int, address: str | None) -> Any:
        """Run an island at its `address`, the one before if None."""
        if address is not None:
            self._addresses[number] = address
        # Of two islands that move, the one that comes second is told where the first one is.
        env = {**self._env, ISLAND: str(number), ISLANDS: ",".join(self._addresses)}
        alone = join_address("127.0.0.1", free_port())
        return actor.run.remote(dataclasses.replace(start, coordinator=alone, env=env), os.getcwd())

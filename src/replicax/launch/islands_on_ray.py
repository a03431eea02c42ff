"""Islands on a Ray cluster: each in its own bundle of resources, and started again by itself."""

import dataclasses
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from replicax.cluster.address import join_address
from replicax.errors import require
from replicax.islands.island_variables import ISLAND, ISLANDS
from replicax.launch.attempt import Attempt, stop_text
from replicax.launch.cause import Ended, FailureReport
from replicax.launch.echo import Echo, Output
from replicax.launch.event_loop import EventLoop, collected_signals, signals_taken
from replicax.launch.island_supervisor import Island, IslandSupervisor, island_labels
from replicax.launch.job_spec import JobSpec
from replicax.launch.process import ProcessStart, free_port
from replicax.launch.ray_worker import WORKER_ENV, forwarded, run_on_node
from replicax.launch.supervisor import GRACE_SECONDS

_LAST_LINES_SECONDS = 0.5
"""How long Ray, too, waits for the last output of its workers before it leaves."""


def run_islands_on_ray(
    ray: ModuleType, job: JobSpec, takes: Mapping[str, int]
) -> tuple[int, str | None]:
    """Run the islands of `job`, each of which takes `takes`; return the exit code and a message.

    The rules of restarts and of the end are those of islands on one host.
    """
    islands = job.islands or 0
    try:
        placed = PlacedIslands(ray, job, takes)
    except ray.exceptions.RayError as error:
        return 1, f"Ray cannot place the islands: {ray_reason(error)}"
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, stop_text(signal.SIGINT)
    except SystemExit:  # Ray's own answer to SIGTERM
        return 128 + signal.SIGTERM, stop_text(signal.SIGTERM)
    echo = Echo(islands, quiet=False)
    with collected_signals() as signals:
        loop = EventLoop(echo, signals, GRACE_SECONDS)
        each = [Island(number, placed.attempts(number, loop), loop) for number in range(islands)]
        try:
            conclusion = IslandSupervisor(each, job.restarts, loop).run()
            time.sleep(_LAST_LINES_SECONDS)
        finally:
            echo.close(lambda: signal.SIGINT in signals_taken(signals))
    return conclusion.exit_code, conclusion.message


class PlacedIslands:
    """The islands' bundles, addresses and actors; it returns once each has a node.

    Raises:
        ray.exceptions.RayError: an actor cannot be started.
    """

    def __init__(self, ray: ModuleType, job: JobSpec, takes: Mapping[str, int]) -> None:
        self.ray, self._job, self._takes = ray, job, takes
        self._job_id, self._secret = secrets.token_hex(8), secrets.token_urlsafe()
        self._env, islands = forwarded(os.environ), job.islands or 0
        self._bundles = ray.util.placement_group([dict(takes)] * islands, strategy="SPREAD")
        ray.get(self._bundles.ready())
        self._first = {number: self._actor(number) for number in range(islands)}
        asked = [actor.address.remote(number, islands) for number, actor in self._first.items()]
        self._addresses: list[str] = ray.get(asked)

    def attempts(self, number: int, loop: EventLoop) -> Callable[[int], Attempt]:
        """Return a function that prepares the next attempt of an island."""
        nowhere = Path(os.devnull)  # its node knows where
        start = ProcessStart(
            *(self._job, 0, "", self._job_id, self._secret, {}, nowhere, nowhere), row=number
        )
        return lambda _: Attempt([start], loop, lambda start, _: RayProcess(self, start, number))

    def begin(self, number: int) -> tuple[Any, Any]:
        """Return an actor for the next start of an island, and its address once it is known.

        The actor of the first start has told its address already, which is None here then.
        """
        if number in self._first:
            return self._first.pop(number), None
        actor = self._actor(number)
        return actor, actor.address.remote(number, len(self._addresses))

    def run(self, actor: Any, start: ProcessStart, number: int, address: str | None) -> Any:
        """Run an island at its `address`, the one before if None; return how it ends, later."""
        if address is not None:
            self._addresses[number] = address
        # Of two islands that move, the one that comes second is told where the first one is.
        place = {ISLAND: str(number), ISLANDS: ",".join(self._addresses)}
        start = dataclasses.replace(start, env={**self._env, **place})
        return actor.run.remote(start, os.getcwd())

    def _actor(self, number: int) -> Any:
        strategies = require("ray.util.scheduling_strategies", "ray")
        options = {
            "num_cpus": self._takes["CPU"],
            "num_gpus": self._takes.get("GPU", 0),
            "max_concurrency": 2,  # a signal is sent while the island runs
            "runtime_env": WORKER_ENV,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                self._bundles, placement_group_bundle_index=number
            ),
        }
        return self.ray.remote(RayIsland).options(**options).remote()


class RayIsland:
    """An actor on the node of a bundle, which runs the island there once."""

    def __init__(self) -> None:
        self._loop: EventLoop | None = None
        self._started = threading.Event()

    def address(self, number: int, islands: int) -> str:
        """Return an address at which no other island listens, even of the same node."""
        while (port := free_port()) % islands != number:
            pass
        return join_address(require("ray.util", "ray").get_node_ip_address(), port)

    def run(self, start: ProcessStart, folder: str) -> Ended:
        """Run the island to its end.

        Raises:
            ClusterError: the system cannot start a process.
        """
        islands = start.job.islands or 0
        start = dataclasses.replace(start, coordinator=join_address("127.0.0.1", free_port()))
        echo = Echo(islands, quiet=False, labels=island_labels(islands, 1))
        with collected_signals() as signals:  # none: this is not the main thread
            self._loop = EventLoop(echo, signals, GRACE_SECONDS)
            self._loop.due[self._started.set] = time.monotonic()
            return run_on_node(start, folder, self._loop)

    def send(self, number: int) -> None:
        """Forward a signal, once the island has started."""
        self._started.wait()
        assert self._loop is not None
        self._loop.send(number)


class RayProcess:
    """An island on Ray as the launcher supervises it, as if it were a process of this host."""

    def __init__(self, placed: PlacedIslands, start: ProcessStart, number: int) -> None:
        self.start = start
        self.status: int | None = None
        self.forced = False
        self.streams: dict[int, Output] = {}  # Ray shows them
        self._placed, self._number = placed, number
        self._ended: Ended | None = None
        self._killed_by: int | None = None
        self._channel, self._wakes = socket.socketpair()
        self.channel: int = self._channel.fileno()
        self._actor, address = placed.begin(number)
        self._runs = address is None
        self._wait_for(self._run(None) if address is None else address)

    def listen(self) -> bool:
        """Take what the actor has answered; return False once the island has ended."""
        self._channel.recv(1)
        try:
            answer = self._answer.result()
        except self._placed.ray.exceptions.RayError as error:  # a worker or a node is lost
            answer = self._lost(error)
        if isinstance(answer, str):
            self._wait_for(self._run(answer))
            return True
        self._ended = dataclasses.replace(answer, forced=self.forced)
        self.status = answer.status
        return False

    def send(self, number: int) -> None:
        """Forward a signal; SIGKILL ends the actor, even if its node does not answer."""
        if self._runs and number != signal.SIGKILL:
            self._actor.send.remote(number)
        else:
            self._killed_by = number
            self._placed.ray.kill(self._actor)

    def stop(self, number: int) -> None:
        """Stop it with a signal, SIGTERM or SIGKILL."""
        self.forced |= self.status is None
        self.send(number)

    def close(self) -> None:
        """Close all descriptors."""
        self._channel.close()
        self._wakes.close()

    def ended(self) -> Ended:
        """Return how the island ended."""
        assert self._ended is not None
        return self._ended

    def _run(self, address: str | None) -> Any:
        self._runs = True
        return self._placed.run(self._actor, self.start, self._number, address)

    def _wait_for(self, reference: Any) -> None:
        self._answer: Future[str | Ended] = reference.future()
        self._answer.add_done_callback(self._wake)

    def _wake(self, _: object) -> None:
        with suppress(OSError):  # closed meanwhile
            self._wakes.send(b"\0")

    def _lost(self, error: Exception) -> Ended:
        now = time.time()
        if self._killed_by is not None:
            return Ended(-self._killed_by, now, self.forced, None, (), None)
        report = FailureReport(now, f"lost with its Ray worker: {ray_reason(error)}", None, ())
        return Ended(1, now, self.forced, report, (), None)


def ray_reason(error: Exception) -> str:
    """Return an error of Ray in one line, without tracebacks, ids and guesses at causes."""
    lines = str(getattr(error, "cause", None) or error).splitlines()
    told = " ".join(line for line in lines if line[:1].strip())
    return told.partition(" Some common causes")[0]

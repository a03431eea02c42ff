"""Actors of Ray that run the processes of a job, and how the launcher supervises them."""

import dataclasses
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from replicax.errors import require
from replicax.launch.attempt import Attempt
from replicax.launch.cause import Ended, FailureReport
from replicax.launch.echo import Echo
from replicax.launch.event_loop import EventLoop, collected_signals
from replicax.launch.island_supervisor import island_labels
from replicax.launch.process import ProcessStart, RunningProcess, free_port
from replicax.launch.supervisor import GRACE_SECONDS
from replicax.net.address import join_address
from replicax.net.secret import SECRET, SECRET_FILE

FORWARDED = ("JAX_", "XLA_", "LIBTPU_", "NCCL_", "GLOO_", "REPLICAX_")
"""Prefixes of the environment variables that are passed on to the command."""
_WORKER_ENV = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}
"""The runtime environment of the workers: the guard, not an exiting worker, ends the command."""


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the launcher that the command gets on another node."""
    return {
        name: value
        for name, value in env.items()
        if name.startswith(FORWARDED) and name not in (SECRET, SECRET_FILE)
    }


class Bundles:
    """Resources for each part of a job; it returns once Ray has reserved them.

    Raises:
        ray.exceptions.RayError: the group of bundles cannot be made.
    """

    def __init__(
        self, ray: ModuleType, takes: Mapping[str, int], count: int, strategy: str
    ) -> None:
        self._ray, self._takes = ray, takes
        self._group = ray.util.placement_group([dict(takes)] * count, strategy=strategy)
        ray.get(self._group.ready())

    def actor(self, number: int) -> Any:
        """Start an actor in a bundle."""
        strategies = require("ray.util.scheduling_strategies", "ray")
        options = {
            "num_cpus": self._takes["CPU"],
            "num_gpus": self._takes.get("GPU", 0),
            "max_concurrency": 2,  # a signal is sent while the process runs
            "runtime_env": _WORKER_ENV,
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number
            ),
        }
        return self._ray.remote(RayWorker).options(**options).remote()


class RayWorker:
    """An actor on the node of a bundle, which runs a process of the job, or an island, there."""

    def __init__(self) -> None:
        self._loop: EventLoop | None = None
        self._started = threading.Event()

    def address(self, number: int, count: int) -> str:
        """Return an address at which no other of `count` actors listens, even of the same node."""
        while (port := free_port()) % count != number:
            pass
        return join_address(require("ray.util", "ray").get_node_ip_address(), port)

    def run(self, start: ProcessStart, folder: str) -> Ended:
        """Run the process to its end, in `folder` if this node has it.

        Raises:
            ClusterError: the system cannot start a process.
        """
        job = start.job
        labels = island_labels(job.islands, 1) if job.islands else ()
        echo = Echo(job.islands or job.processes, quiet=False, labels=labels)
        with collected_signals() as signals:  # none: this is not the main thread
            self._loop = EventLoop(echo, signals, GRACE_SECONDS)
            self._loop.due[self._started.set] = time.monotonic()  # the first turn: it has started
            return _run_on_node(start, folder, self._loop)

    def send(self, number: int) -> None:
        """Forward a signal, once the process has started."""
        self._started.wait()
        assert self._loop is not None
        self._loop.send(number)


class PlacedParts(Protocol):
    """Where the processes of a job, or its islands, run on Ray."""

    ray: ModuleType

    def begin(self, number: int) -> tuple[Any, Any]:
        """Return an actor for the next start of a part, and an address once it is known.

        It is None if the address is known, and the part can run.
        """

    def run(self, actor: Any, start: ProcessStart, number: int, address: str | None) -> Any:
        """Run the part; return how it ends, later."""


class RayProcess(RunningProcess):
    """A process on Ray as the launcher supervises it, as if it were one of this host."""

    def __init__(self, placed: PlacedParts, start: ProcessStart, number: int) -> None:
        self.start = start
        self.status: int | None = None
        self.forced = False
        self.streams = {}  # Ray shows them
        self._placed, self._number = placed, number
        self._ended: Ended | None = None
        self._killed_by: int | None = None
        # Ray answers in a thread of its own: a byte wakes the loop, which polls descriptors.
        self._channel, self._wakes = socket.socketpair()
        self.channel = self._channel.fileno()
        self._actor, address = placed.begin(number)
        self._runs = address is None
        self._wait_for(self._run(None) if address is None else address)

    def listen(self) -> bool:
        """Take what the actor has answered; return False once the process has ended."""
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
        # An actor that still waits for an address has no process to send a signal to.
        if self._runs and number != signal.SIGKILL:
            self._actor.send.remote(number)
        else:
            self._killed_by = number
            self._placed.ray.kill(self._actor)

    def close(self) -> None:
        """Close all descriptors."""
        self._channel.close()
        self._wakes.close()

    def ended(self) -> Ended:
        """Return how the process ended."""
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
    shown = " ".join(line for line in lines if line[:1].strip())
    return shown.partition(" Some common causes")[0]


def _run_on_node(start: ProcessStart, folder: str, loop: EventLoop) -> Ended:
    """Run the command of `start` to its end, in `folder` if this node has it.

    Its environment is the node's, with that of `start`; Ray keeps its output.

    Raises:
        ClusterError: the system cannot start a process.
    """
    row = start.number if start.row is None else start.row
    try:
        os.chdir(folder)
    except OSError as error:
        where = f"{folder}: {error.strerror} on this node; running in {os.getcwd()}"
        loop.echo.lines(row, [f"replicax: {where}".encode()], error=False)
    # Programs next to the Python that runs Ray come first: `python`, `replicax`.
    path = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    env = {**os.environ, **start.env, "PATH": os.pathsep.join(path)}
    with tempfile.TemporaryDirectory(prefix="replicax-") as temporary:
        report = Path(temporary) / "failure.json"
        here = dataclasses.replace(start, env=env, log=Path(os.devnull), report=report)
        try:
            (ended,) = Attempt([here], loop).run()
        finally:
            loop.echo.close(lambda: False)
    return dataclasses.replace(ended, log=None)

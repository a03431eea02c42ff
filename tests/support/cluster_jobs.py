"""Jobs whose processes are threads of the test: their hub, and their links to it."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from support.waiting import HANG_SECONDS, until

from replicax.cluster.cluster_job import Linked
from replicax.cluster.hub import Hub, Prepare
from replicax.cluster.link import Link
from replicax.cluster.place import Place
from replicax.cluster.rendezvous import meet
from replicax.cluster.watchdog import LoopProgress, StuckVerdict, Timeouts
from replicax.cluster.wire import Connection, Go, Hello
from replicax.core.ground.in_flight import InFlight
from replicax.net.secret import Secret

VERSIONS = {"python": "3.13.1", "jax": "0.10.2"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


NO_SECRET = Secret()


def place(
    process: int, processes: int, port: int, job: str = "ours", secret: Secret = NO_SECRET
) -> Place:
    address = f"127.0.0.1:{port}"
    return Place(process, processes, address, job, None, None, None, "test", {}, secret)


class Process:
    """A thread's part in a job."""

    def __init__(
        self, process: int, wire: Connection, go: Go, timeouts: Timeouts, over: threading.Event
    ) -> None:
        self.process, self.go, self.wire, self._over = process, go, wire, over
        self.stopped: Future[StuckVerdict] = Future()
        progress = LoopProgress(InFlight())
        self.link = Link(wire, process, go.names, timeouts, progress, self.stopped.set_result)
        self.job = Linked(place(process, self.link.processes, 0), self.link)

    def gather(self, topic: str, value: Any) -> list[Any]:
        """As the link's, and without waiting any longer once the test is over."""
        return self.link.gather(topic, value, self._over.is_set)

    def reason(self) -> str:
        """Why it was stopped."""
        return self.stopped.result(timeout=HANG_SECONDS).reason


class Job:
    """A job on a port of its own; all that it opened is closed at the end."""

    def __init__(
        self,
        processes: int,
        timeouts: Timeouts,
        timeout_seconds: float,
        secret: Secret = NO_SECRET,
    ) -> None:
        self.secret = secret
        self.processes, self.timeouts, self.timeout_seconds = processes, timeouts, timeout_seconds
        self.port = free_port()
        self.said: list[str] = []
        self._closing = contextlib.ExitStack()
        self._threads = ThreadPoolExecutor(16)
        self._closing.callback(self._threads.shutdown)
        self._over = threading.Event()
        self.hub: Hub | None = None

    def open(self, prepare: Prepare = lambda hellos: ()) -> None:
        own = place(0, self.processes, self.port, secret=self.secret)
        self.hub = Hub(own, self.timeouts, self.timeout_seconds, prepare)
        self._closing.callback(self.hub.close)

    def come(
        self,
        process: int,
        *,
        job: str = "ours",
        processes: int | None = None,
        timeout_seconds: float | None = None,
        versions: Mapping[str, str] = VERSIONS,
        secret: Secret | None = None,
    ) -> Future[Process]:
        """`process` comes in a thread of its own."""
        coordinator, host = f"127.0.0.1:{self.port}", socket.gethostname()
        of = processes or self.processes
        hello = Hello(job, process, of, host, os.getpid(), versions)
        seconds = timeout_seconds or self.timeout_seconds

        def coming() -> Process:
            wire, go = meet(coordinator, hello, secret or self.secret, seconds, self.said.append)
            self._closing.callback(wire.close)
            came = Process(process, wire, go, self.timeouts, self._over)
            self._closing.callback(came.link.close)
            return came

        return self._threads.submit(coming)

    def start(self) -> list[Process]:
        """All come, in the wrong order."""
        coming = [self.come(process) for process in reversed(range(self.processes))]
        return [future.result(timeout=HANG_SECONDS) for future in reversed(coming)]

    def works(self, processes: list[Process], topic: str = "still there") -> bool:
        """Return whether its processes get each other's values."""
        waiting = [self.call(each.gather, topic, each.process) for each in processes]
        values = [each.result(timeout=HANG_SECONDS) for each in waiting]
        return values == [list(range(self.processes))] * self.processes

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._threads.submit(function, *arguments)

    def stranger(self) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", self.port), timeout=HANG_SECONDS)
        self._closing.callback(connected.close)
        return connected

    @contextlib.contextmanager
    def hub_asleep(self) -> Iterator[None]:
        """Within this context the hub does nothing, as in a process that was stopped."""
        assert self.hub is not None
        asleep, awake = threading.Event(), threading.Event()

        def sleep() -> None:
            asleep.set()
            awake.wait(HANG_SECONDS)

        self.hub._loop.call_soon_threadsafe(sleep)
        assert asleep.wait(HANG_SECONDS)
        try:
            yield
        finally:
            awake.set()

    def close(self) -> None:
        self._over.set()
        self._closing.close()


@contextlib.contextmanager
def opened(
    processes: int,
    *,
    silent_seconds: float = 5.0,
    timeout_seconds: float = HANG_SECONDS,
    secret: Secret = NO_SECRET,
) -> Iterator[Job]:
    """A job whose hub serves; no thread of it is left at the end."""
    before = set(threading.enumerate())
    job = Job(processes, Timeouts(silent_seconds=silent_seconds), timeout_seconds, secret)
    try:
        job.open()
        yield job
    finally:
        job.close()
    until(lambda: set(threading.enumerate()) <= before)

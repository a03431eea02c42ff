"""Jobs whose processes are threads of the test: their hub, and their links to it."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from replicax.cluster.hub import Hub
from replicax.cluster.link import Link
from replicax.cluster.meeting import meet, open_hub
from replicax.cluster.patience import Patience
from replicax.cluster.place import Place
from replicax.cluster.verdict import Verdict
from replicax.cluster.wire import Message, Wire

VERSIONS = {"python": "3.13.1", "jax": "0.10.2"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def place(process: int, processes: int, port: int, job: str = "ours") -> Place:
    address = f"127.0.0.1:{port}"
    return Place(process, processes, address, job, None, None, None, "test", {})


def until(true: Callable[[], Any], seconds: float = 5.0) -> Any:
    """What `true` gives once that is true; an error after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
    return value


class Process:
    """A thread's part in a job."""

    def __init__(
        self, process: int, wire: Wire, go: Message, patience: Patience, over: threading.Event
    ) -> None:
        self.process, self.go, self.wire, self._over = process, go, wire, over
        self.stopped: Future[Verdict] = Future()
        self.link = Link(wire, process, go["names"], patience, self.stopped.set_result)

    def gather(self, topic: str, value: Any) -> list[Any]:
        """As the link's, and without waiting any longer once the test is over."""
        return self.link.gather(topic, value, self._over.is_set)

    def reason(self) -> str:
        """Why it was stopped."""
        return self.stopped.result(timeout=5.0).reason


class Job:
    """A job on a port of its own; all that it opened is closed at the end."""

    def __init__(self, processes: int, patience: Patience, timeout_seconds: float) -> None:
        self.processes, self.patience, self.timeout_seconds = processes, patience, timeout_seconds
        self.port = free_port()
        self.said: list[str] = []
        self._closing = contextlib.ExitStack()
        self._threads = ThreadPoolExecutor(16)
        self._closing.callback(self._threads.shutdown)
        self._over = threading.Event()
        self.hub: Hub | None = None

    def open(self, prepare: Callable[[list[Message]], Message] = lambda hellos: {}) -> None:
        own = place(0, self.processes, self.port)
        self.hub = open_hub(own, self.patience, self.timeout_seconds, prepare)
        self._closing.callback(self.hub.close)

    def come(
        self,
        process: int,
        *,
        job: str = "ours",
        processes: int | None = None,
        timeout_seconds: float | None = None,
        versions: Mapping[str, str] = VERSIONS,
    ) -> Future[Process]:
        """`process` comes in a thread of its own."""
        there = place(process, processes or self.processes, self.port, job)
        seconds = timeout_seconds or self.timeout_seconds

        def coming() -> Process:
            wire, go = meet(there, {"versions": dict(versions)}, seconds, self.said.append)
            self._closing.callback(wire.close)
            came = Process(process, wire, go, self.patience, self._over)
            self._closing.callback(came.link.close)
            return came

        return self._threads.submit(coming)

    def start(self) -> list[Process]:
        """All come, in the wrong order."""
        coming = [self.come(process) for process in reversed(range(self.processes))]
        return [future.result(timeout=5.0) for future in reversed(coming)]

    def call(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._threads.submit(function, *arguments)

    def stranger(self) -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", self.port), timeout=5.0)
        self._closing.callback(connected.close)
        return connected

    def close(self) -> None:
        self._over.set()
        self._closing.close()


@contextlib.contextmanager
def opened(
    processes: int, *, silent_seconds: float = 5.0, timeout_seconds: float = 5.0
) -> Iterator[Job]:
    """A job whose hub serves; no thread of it is left at the end."""
    before = set(threading.enumerate())
    job = Job(processes, Patience(silent_seconds=silent_seconds), timeout_seconds)
    try:
        job.open()
        yield job
    finally:
        job.close()
    until(lambda: set(threading.enumerate()) <= before)

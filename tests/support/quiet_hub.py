"""The hub of a job without threads, sockets and time: a test says what happens next."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import msgspec
from support.clock import Clock
from support.cluster_jobs import NO_SECRET, place

from replicax.cluster import hub, job_listener, wire
from replicax.cluster.hub import LOOK_SECONDS, Hub
from replicax.cluster.watchdog import StuckVerdict, Timeouts
from replicax.cluster.wire import Go, Hello, Message, decode
from replicax.net import stall_clock
from replicax.net.message import Received, encode
from replicax.net.proof import DIALS, Proof, proof
from replicax.net.secret import Secret


class Connection:
    """A connection to the hub, and what came back on it."""

    def __init__(self, quiet: "QuietHub") -> None:
        self._quiet, self.closed = quiet, False
        self.said, self._told = bytearray(), bytearray()
        self.peer = job_listener.Peer(quiet.hub._hear, quiet.hub._lost)
        self.peer.connection_made(mock.MagicMock(spec=asyncio.Transport, **self._transport()))

    def _transport(self) -> dict[str, Any]:
        return {"write": self._told.extend, "is_closing": lambda: self.closed, "close": self.close}

    @property
    def told(self) -> list[Message]:
        """The answers of the hub, without heartbeats, and without the handshake."""
        apart = wire.Tick | wire.Prove | Proof
        return [message for message in self.all_told if not isinstance(message, apart)]

    @property
    def all_told(self) -> list[Message]:
        """The answers of the hub."""
        received = Received(1 << 24)
        received.feed(bytes(self._told))
        return [decode(text) for text in iter(received.take, None)]

    def say(self, message: Message | bytes) -> None:
        said = message if isinstance(message, bytes) else encode(message)
        self.said += said
        if not self.closed:
            self.peer.data_received(said)

    def close(self) -> None:
        """End it, from either end."""
        if not self.closed:
            self.closed = True
            self.peer.connection_lost(None)

    def verdicts(self) -> list[StuckVerdict]:
        return [each for each in self.told if isinstance(each, StuckVerdict)]


class QuietHub:
    """A hub that does something when a test says so; use it as a context manager."""

    def __init__(
        self, processes: int, timeouts: Timeouts, join_seconds: float, secret: Secret = NO_SECRET
    ) -> None:
        self.clock, self._later, self._order = Clock(), [], itertools.count()
        self.secret = secret
        self._patches = [
            mock.patch.object(hub, "bound_socket"),
            mock.patch.object(stall_clock, "time", self.clock),
            mock.patch.object(hub.threading, "Thread"),
            mock.patch.object(hub.asyncio, "new_event_loop", return_value=self),
            mock.patch.object(hub.asyncio, "sleep", _Turn),
            mock.patch.object(job_listener.asyncio, "get_running_loop", return_value=self),
        ]
        self._given = place(0, processes, 1, secret=secret), timeouts, join_seconds

    def __enter__(self) -> "QuietHub":
        for each in self._patches:
            each.start()
        self.hub = Hub(*self._given, lambda hellos: (700, [None] * len(hellos)))
        self._watch = self.hub._watch()
        self._watch.send(None)
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.close()
        for each in self._patches:
            each.stop()

    def call_later(self, seconds: float, call: Callable[..., None], *arguments: Any) -> Any:
        cancelled = mock.Mock(cancel=lambda: live.clear())
        live = [call]
        later = self.clock.now + seconds, next(self._order), live, arguments
        heapq.heappush(self._later, later)
        return cancelled

    def connect(self) -> Connection:
        return Connection(self)

    def join(self, rank: int, count: int, **more: Any) -> Connection:
        """Let a process come that knows the secret, unless `more` says otherwise."""
        connection = self.connect()
        key = more.pop("key", self.secret)
        hello = Hello("ours", rank, count, f"host {rank}", 100 + rank)
        hello = msgspec.structs.replace(hello, **more)
        connection.say(hello)
        if isinstance(prove := connection.all_told[-1], wire.Prove):
            connection.say(proof(key, DIALS, hello, prove))
        return connection

    def wait(self, seconds: float, *, frozen: bool = False) -> None:
        """Let time pass; the hub looks at it all the while, unless its process is `frozen`."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = until if frozen else min(self.clock.now + LOOK_SECONDS, until)
            while self._later and self._later[0][0] <= self.clock.now:
                *_, live, arguments = heapq.heappop(self._later)
                for call in live:
                    call(*arguments)
            self._watch.send(None)


class _Turn:
    """Stands in for a sleep: it ends when the coroutine is sent something."""

    def __init__(self, _seconds: float) -> None:
        pass

    def __await__(self) -> Any:
        yield


def starts(connections: Sequence[Connection]) -> list[Go]:
    """Return what all were told at the start."""
    return [each for connection in connections for each in connection.told if isinstance(each, Go)]

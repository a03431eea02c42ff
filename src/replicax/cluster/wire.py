"""Messages between the processes of a job: one JSON array per line, over TCP.

Received data is never executed: an unknown client is only rejected.
"""

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from replicax.cluster.pulse import Standing
from replicax.cluster.verdict import Verdict

LONGEST_LINE_BYTES = 1 << 26
"""A longer message does not come from Replicax, and ends the connection."""
SEND_SECONDS = 10.0
"""Timeout for sending. Messages are small: if a socket stays full, its reader is frozen or gone."""

# To process 0. `Standing` is a heartbeat, and a `Verdict` makes it stop the job.


class Hello(NamedTuple):
    """The first message of a process."""

    job: str
    process: int
    processes: int
    host: str = ""
    pid: int = 0
    versions: Mapping[str, str] = {}
    gpus: Sequence[str] = ()
    """UUIDs of the visible GPUs."""
    local_devices: Sequence[int] | None = None
    asks: bool = False
    """Whether it only asks which job uses this port."""


class Gather(NamedTuple):
    """A value for all others; every process sends one."""

    topic: str
    value: Any
    patience_seconds: float | None = None
    """Timeout for the others; by default how long each may go without progress."""


class Withdraw(NamedTuple):
    """The process no longer waits for the others' values."""

    topic: str


class Failed(NamedTuple):
    """The process ends with an error."""

    error: str
    collateral: bool
    """Whether that looks like another process's fault."""


class Bye(NamedTuple):
    """The process is done."""


# From process 0, which also sends a `Verdict` to stop all.


class Refused(NamedTuple):
    """The process does not belong to the job; the connection ends."""

    reason: str


class Tick(NamedTuple):
    """A heartbeat."""

    missing: Sequence[int]
    """Processes that have not joined yet."""


class Go(NamedTuple):
    """All processes have joined."""

    names: Sequence[str]
    """Readable names of the processes, in order."""
    port: int = 0
    """Port of JAX's own service, on the same host."""
    local_devices: Sequence[Sequence[int] | None] = ()
    """Indices of the visible accelerators that each process uses; `None`: all."""


class Gathered(NamedTuple):
    """The values of all processes, in order."""

    topic: str
    values: list[Any]


Message = (
    Hello | Standing | Gather | Withdraw | Failed | Bye | Verdict | Refused | Tick | Go | Gathered
)
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """Return `message` as a line."""
    return json.dumps([type(message).__name__, *message], separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in `line`; `ValueError` if there is none."""
    try:
        kind, *fields = json.loads(line)
        message: Message = _KINDS[kind](*fields)
    except (TypeError, LookupError) as error:
        raise ValueError(f"{line[:80]!r} is not a message") from error
    return message


class Connection:
    """One end of a connection. Any thread may send; one at a time may receive."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(SEND_SECONDS)
        self._sending = threading.Lock()
        self._unread = bytearray()

    def send(self, message: Message) -> None:
        """Send `message`; `OSError` if the other end is gone or no longer reads."""
        with self._sending:
            self._socket.sendall(encode(message))

    def receive(self, timeout_seconds: float) -> Iterator[Message]:
        """Yield the messages that arrive within `timeout_seconds`, as soon as any arrives.

        Raise `ConnectionError` if the other end has closed, and `ValueError` if it does not
        follow this protocol.
        """
        searched = 0
        while self._unread.find(b"\n", searched) < 0:
            searched = len(self._unread)
            # A timeout of the socket would also apply to a `send` in another thread, and
            # an epoll would not wake up when another thread closes the socket.
            with selectors.PollSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                if not selector.select(timeout_seconds):
                    return
            arrived = self._socket.recv(1 << 16)
            if not arrived:
                raise ConnectionResetError("closed by the other end")
            self._unread += arrived
            if len(self._unread) > LONGEST_LINE_BYTES:
                raise ValueError("unterminated message")
        while (end := self._unread.find(b"\n")) >= 0:
            line = bytes(self._unread[:end])
            del self._unread[: end + 1]  # before the yield: the next call gets the rest
            yield decode(line)

    def close(self) -> None:
        """Close this end; a `receive` in another thread then ends as well."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

"""Messages between the processes of a job: one JSON array a line, over TCP.

Nothing that arrives is ever executed: whoever reaches the port can at most be refused.
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
"""A longer message is a stranger's, and ends the connection."""
SEND_SECONDS = 10.0
"""How long a full socket is waited for. Messages are small: its reader is frozen or gone."""

# To process 0. `Standing` is a sign of life, and a `Verdict` has it stop the job.


class Hello(NamedTuple):
    """The first message of a process."""

    job: str
    process: int
    processes: int
    host: str = ""
    pid: int = 0
    versions: Mapping[str, str] = {}
    gpus: Sequence[str] = ()
    """UUIDs of those that it sees."""
    local_devices: Sequence[int] | None = None
    asks: bool = False
    """Whether it only asks whose port this is."""


class Gather(NamedTuple):
    """A value for all others; the job awaits everybody's."""

    topic: str
    value: Any
    patience_seconds: float | None = None
    """How long the others may take; by default as long as each may go without progress."""


class Withdraw(NamedTuple):
    """The process waits no longer for others' values."""

    topic: str


class Failed(NamedTuple):
    """The process ends with an error."""

    error: str
    collateral: bool
    """Whether that looks like another's fault."""


class Bye(NamedTuple):
    """The process is done."""


# From process 0, which tells all why they stop with a `Verdict`.


class Refused(NamedTuple):
    """The process is none of the job; the connection ends."""

    reason: str


class Tick(NamedTuple):
    """A sign of life."""

    missing: Sequence[int]
    """Processes that have not come yet."""


class Go(NamedTuple):
    """All have come."""

    names: Sequence[str]
    """As people would want them named, in order."""
    port: int = 0
    """Where JAX's own service will listen, on the same host."""
    local_devices: Sequence[Sequence[int] | None] = ()
    """Which of its visible accelerators each process takes; `None`: all."""


class Gathered(NamedTuple):
    """Everybody's value, in order."""

    topic: str
    values: list[Any]


Message = (
    Hello | Standing | Gather | Withdraw | Failed | Bye | Verdict | Refused | Tick | Go | Gathered
)
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def encode(message: Message) -> bytes:
    """`message` as a line."""
    return json.dumps([type(message).__name__, *message], separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in `line`; `ValueError` if there is none."""
    try:
        kind, *fields = json.loads(line)
        message: Message = _KINDS[kind](*fields)
    except (TypeError, LookupError) as error:
        raise ValueError(f"{line[:80]!r} is no message") from error
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
        """Send `message`; `OSError` where the other end is gone or takes nothing any more."""
        with self._sending:
            self._socket.sendall(encode(message))

    def receive(self, timeout_seconds: float) -> Iterator[Message]:
        """Yield the messages that arrive within `timeout_seconds`, as soon as something does.

        Raise `ConnectionError` where the other end has closed, and `ValueError` where it does not
        speak this language.
        """
        searched = 0
        while self._unread.find(b"\n", searched) < 0:
            searched = len(self._unread)
            # A timeout of the socket itself would also be that of a `send` in another thread, and
            # an epoll would sleep on when another thread closes the socket.
            with selectors.PollSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                if not selector.select(timeout_seconds):
                    return
            arrived = self._socket.recv(1 << 16)
            if not arrived:
                raise ConnectionResetError("closed by the other end")
            self._unread += arrived
            if len(self._unread) > LONGEST_LINE_BYTES:
                raise ValueError("a message without an end")
        while (end := self._unread.find(b"\n")) >= 0:
            line = bytes(self._unread[:end])
            del self._unread[: end + 1]  # before it is used: who stops here gets the rest later
            yield decode(line)

    def close(self) -> None:
        """Close this end; a `receive` in another thread then ends as well."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

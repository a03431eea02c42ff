"""Messages between the processes of a job."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from replicax.cluster.watchdog import Heartbeat, StuckVerdict
from replicax.net.message import Received, Typed, encode, read_message
from replicax.net.proof import Proof, Refusal

LONGEST_VALUE_BYTES = 1 << 24
"""The limit for a message of a process; a longer one ends the connection."""
LONGEST_HELLO_BYTES = 1 << 16
"""The limit for a first message, which may come from anyone."""
SEND_SECONDS = 10.0
"""Timeout for sending. Messages are small: if a socket stays full, its reader is frozen or gone."""

# To process 0. A `Heartbeat` comes every second; a `StuckVerdict` makes it stop the job.


class Hello(Typed):
    """The first message of a process."""

    job: str
    process: int
    processes: int
    host: str = ""
    pid: int = 0
    environment: Mapping[str, str] = {}
    """Versions, flags and settings, which must be the same in all processes."""
    processor: Mapping[str, str] = {}
    """The kind of processor, if the job computes on it."""
    gpus: Sequence[str] = ()
    """UUIDs of the visible GPUs."""
    local_devices: Sequence[int] | None = None
    asks: bool = False
    """Whether it only asks who uses this port."""
    nonce: str = ""
    """Random text of this connection, for the proofs."""


class Gather(Typed):
    """A value for all others; every process sends one."""

    topic: str
    value: str
    """In JSON."""
    timeout_seconds: float | None = None
    """Timeout for the others; by default how long each may go without progress."""


class Withdraw(Typed):
    """The process no longer waits for the others' values."""

    topic: str


class Failed(Typed):
    """The process ends with an error."""

    error: str
    collateral: bool
    """Whether that looks like another process's fault."""


class Bye(Typed):
    """The process is done."""


# From process 0, which also sends a `StuckVerdict` to stop all.


class Prove(Typed):
    """The answer to `Hello`: a `Proof` of each end follows, that of process 0 if it admits."""

    nonce: str


class Busy(Typed):
    """Too many connections are open that are not proven, and this one ends: try again."""


class Tick(Typed):
    """A heartbeat."""

    missing: Sequence[int]
    """Processes that have not joined yet."""


class Go(Typed):
    """All processes have joined."""

    names: Sequence[str]
    """Readable names of the processes, in order."""
    port: int = 0
    """Port of JAX's own service, on the same host."""
    local_devices: Sequence[Sequence[int] | None] = ()
    """Indices of the visible accelerators that each process uses; `None`: all."""


class Gathered(Typed):
    """The values of all processes, in order."""

    topic: str
    values: Sequence[str]
    """In JSON."""


Message = (
    Hello
    | Proof
    | Prove
    | Heartbeat
    | Gather
    | Withdraw
    | Failed
    | Bye
    | StuckVerdict
    | Refusal
    | Busy
    | Tick
    | Go
    | Gathered
)
_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def decode(text: bytes) -> Message:
    """Return the message in `text`; `ValueError` if there is none."""
    return read_message(text, _DECODER)


class Connection:
    """One end of a connection. Any thread may send; one at a time may receive."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(SEND_SECONDS)
        self._sending = threading.Lock()
        self._received = Received(LONGEST_VALUE_BYTES)

    def send(self, message: Message) -> None:
        """Send `message`; `OSError` if the other end is gone or no longer reads."""
        with self._sending:
            self._socket.sendall(encode(message))

    def expect(self, processes: int) -> None:
        """Allow for messages with a value of each of `processes`."""
        self._received.most_bytes = processes * LONGEST_VALUE_BYTES

    def receive(self, timeout_seconds: float) -> Iterator[Message]:
        """Yield the messages that arrive within `timeout_seconds`, as soon as any arrives.

        Raise `ConnectionError` if the other end has closed, and `ValueError` if it does not
        follow this protocol.
        """
        while (text := self._received.take()) is None:
            # A timeout of the socket would also apply to a `send` in another thread, and
            # an epoll would not wake up when another thread closes the socket.
            with selectors.PollSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                if not selector.select(timeout_seconds):
                    return
            arrived = self._socket.recv(1 << 16)
            if not arrived:
                raise ConnectionResetError("closed by the other end")
            self._received.feed(arrived)
        while text is not None:
            yield decode(text)
            text = self._received.take()

    def close(self) -> None:
        """Close this end; a `receive` in another thread then ends as well."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

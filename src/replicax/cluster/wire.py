"""Messages between the processes of a job: one JSON object a line, over TCP.

Nothing that arrives is ever executed: whoever reaches the port can at most be refused.
"""

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Iterator
from typing import Any

Message = dict[str, Any]

LONGEST_LINE_BYTES = 1 << 26
"""A longer message is a stranger's, and ends the connection."""

SEND_SECONDS = 10.0
"""How long a full socket is waited for. Messages are small: its reader is frozen or gone."""


def encode(message: Message) -> bytes:
    """`message` as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in `line`.

    Raises:
        ValueError: it is none.
    """
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"a message is an object, and this is a {type(message).__name__}")
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

        Raises:
            ConnectionError: the other end has closed.
            ValueError: it does not speak this language.
        """
        searched = 0
        while self._unread.find(b"\n", searched) < 0:
            searched = len(self._unread)
            # A timeout of the socket itself would also be that of a `send` in another thread.
            if not _readable(self._socket, timeout_seconds):
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


def _readable(connected: socket.socket, timeout_seconds: float) -> bool:
    # An epoll would sleep on when another thread closes the socket.
    with selectors.PollSelector() as selector:
        selector.register(connected, selectors.EVENT_READ)
        return bool(selector.select(timeout_seconds))

"""One end of a connection, for threads."""

import contextlib
import socket
import time
from collections.abc import Sequence

from replicax.net.message import Received, Typed, encode

LONGEST_MESSAGE_BYTES = 1 << 22
"""The limit for a message."""
CHUNK_BYTES = 1 << 20
"""Received at once; a checksum then finds these bytes in the processor's cache."""
_MOST_BUFFERS = 512
"""Buffers sent at once; Linux allows 1,024."""


class Channel:
    """One end of a connection. One thread at a time may send, and one may receive.

    Methods raise `OSError` if the connection has ended, and `ValueError` if the other end does not
    follow this protocol.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        with contextlib.suppress(OSError):  # it has ended, as the first use will tell
            # Small messages go at once, without a wait for the acknowledgement of the last one.
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(None)
        self._deadline: float | None = None
        self.sent_bytes = self.received_bytes = 0

    def limit(self, seconds: float | None) -> None:
        """Let all that follows take at most `seconds`; None: any time."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._socket.settimeout(None)

    def send(self, message: Typed) -> None:
        """Send `message`."""
        self.send_bytes([encode(message)])

    def send_bytes(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send all bytes of `buffers`, without copying them together."""
        waiting = [memoryview(buffer) for buffer in buffers if len(buffer)]
        first = 0
        while first < len(waiting):
            self._set_timeout()
            sent = self._socket.sendmsg(waiting[first : first + _MOST_BUFFERS])
            self.sent_bytes += sent
            while first < len(waiting) and sent >= len(waiting[first]):
                sent -= len(waiting[first])
                first += 1
            if sent:
                waiting[first] = waiting[first][sent:]

    def receive(self, most_bytes: int = LONGEST_MESSAGE_BYTES) -> bytes:
        """Return the JSON of the next message, which has at most `most_bytes`."""
        received = Received(most_bytes)
        while (text := received.take()) is None:
            chunk = bytearray(received.missing_bytes)
            self.fill(memoryview(chunk))
            received.feed(chunk)
        return text

    def fill(self, view: memoryview) -> None:
        """Receive as many bytes as `view` has."""
        filled = 0
        while filled < len(view):
            self._set_timeout()
            count = self._socket.recv_into(view[filled:])
            if not count:
                raise ConnectionResetError("closed by the other end")
            filled += count
            self.received_bytes += count

    def skip(self, count: int) -> None:
        """Receive `count` bytes, and forget them."""
        chunk = memoryview(bytearray(min(count, CHUNK_BYTES)))
        while count:
            self.fill(chunk[: min(count, len(chunk))])
            count -= min(count, len(chunk))

    def has_ended(self) -> bool:
        """Whether the other end has closed, or has sent something that nobody waits for."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def end(self) -> None:
        """End the connection; any thread may, and those that use it get an error."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the socket, once no other thread uses it."""
        self.end()
        self._socket.close()

    def _set_timeout(self) -> None:
        if self._deadline is not None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:  # a timeout of 0 would not block, and one below it is an error
                raise TimeoutError("too slow")
            self._socket.settimeout(remaining)

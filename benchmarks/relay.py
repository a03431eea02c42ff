"""A relay between islands on one host, which passes bytes on at the rates of their links."""

import contextlib
import socket
import threading
import time
from collections.abc import Collection

_CHUNK_BYTES = 1 << 15
_CONNECT_SECONDS = 2.0


class TokenBucket:
    """The next time at which bytes may pass a link; threads share it."""

    def __init__(self, bytes_per_second: float, burst_bytes: int) -> None:
        self._bytes_per_second = bytes_per_second
        self._burst_seconds = burst_bytes / bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def reserve(self, count: int) -> float:
        """Let `count` bytes pass after those before; return the time at which they have."""
        with self._lock:
            # A link that rested lets a burst pass at once.
            begins = max(self._free_at, time.monotonic() - self._burst_seconds)
            self._free_at = begins + count / self._bytes_per_second
            return self._free_at


class Relay:
    """Listens in the place of every island, once for each other one, and passes bytes on.

    Bytes wait for the uplink of the island that sends them and the downlink of the other. A
    subclass may disturb connections in `hold` and `carry`.
    """

    def __init__(self, islands: int, bytes_per_second: float, burst_bytes: int) -> None:
        own = [socket.create_server(("127.0.0.1", 0)) for _ in range(islands)]
        self.ports = [each.getsockname()[1] for each in own]
        """On which the islands listen."""
        self._up = [TokenBucket(bytes_per_second, burst_bytes) for _ in range(islands)]
        self._down = [TokenBucket(bytes_per_second, burst_bytes) for _ in range(islands)]
        self._lock, self._closing = threading.Lock(), False
        self._open: dict[socket.socket, set[int]] = {}
        self._listening: dict[tuple[int, int], socket.socket] = {}
        for dialler in range(islands):
            for other in {*range(islands)} - {dialler}:
                self._listening[dialler, other] = socket.create_server(("127.0.0.1", 0))
        for each in own:  # free now, and no port of the relay
            each.close()
        for pair in self._listening:
            threading.Thread(target=self._accept, args=pair, daemon=True).start()

    def ports_of(self, island: int) -> list[int]:
        """Return the ports by island: its own, on which it listens, and those of the relay."""
        return [
            port if other == island else self._listening[island, other].getsockname()[1]
            for other, port in enumerate(self.ports)
        ]

    def cut(self, islands: Collection[int]) -> None:
        """End all connections among these islands; new ones may come."""
        with self._lock:
            ending = [each for each, pair in self._open.items() if pair <= {*islands}]
        for each in ending:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections, and accept no more."""
        with self._lock:
            self._closing = True
        for each in self._listening.values():
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self.cut(range(len(self.ports)))

    def hold(self, one: int, other: int) -> None:
        """Wait until a connection of two islands may begin or end: here not at all."""

    def carry(self, sender: int, receiver: int, data: memoryview, to: socket.socket) -> None:
        """Send bytes on once they have passed both links; an `OSError` ends the connection."""
        # Both links carry a byte at the same time, as packets follow one another.
        count = len(data)
        until = max(self._up[sender].reserve(count), self._down[receiver].reserve(count))
        time.sleep(max(until - time.monotonic(), 0.0))
        to.sendall(data)

    def _accept(self, dialler: int, other: int) -> None:
        listening = self._listening[dialler, other]
        while True:
            try:
                dialled, _ = listening.accept()
            except OSError:
                return
            self.hold(dialler, other)
            try:
                address = "127.0.0.1", self.ports[other]
                reached = socket.create_connection(address, timeout=_CONNECT_SECONDS)
                reached.settimeout(None)
            except OSError:  # it does not listen yet, or any more
                dialled.close()
                continue
            ways = (dialler, other, dialled, reached), (other, dialler, reached, dialled)
            with self._lock:
                self._open |= {end: {dialler, other} for end in (dialled, reached)}
                closing = self._closing
            left = [2]
            for way in ways:
                threading.Thread(target=self._pump, args=(*way, left), daemon=True).start()
            if closing:
                dialled.shutdown(socket.SHUT_RDWR)

    def _pump(
        self, sender: int, receiver: int, source: socket.socket, to: socket.socket, left: list[int]
    ) -> None:
        """Pass bytes on in one direction until it ends, and free both ends after the last one."""
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        with contextlib.suppress(OSError):
            for each in (source, to):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while count := source.recv_into(buffer):
                self.carry(sender, receiver, buffer[:count], to)
        self.hold(sender, receiver)
        with self._lock:
            left[0] -= 1
            last = not left[0]
            for each in (source, to) if last else ():
                del self._open[each]
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.close() if last else each.shutdown(socket.SHUT_RDWR)

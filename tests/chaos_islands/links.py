"""The wires between islands: each pair's connections go through a proxy that can disturb them."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection

_CHUNK_BYTES = 1 << 16


class Wire:
    """Everything that flows between two islands, of which each dials the other.

    `ports` are those on which they listen.
    """

    def __init__(self, pair: tuple[int, int], ports: tuple[int, int]) -> None:
        self.pair = pair
        self._flows = threading.Event()
        self._flows.set()
        self._closing = False
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._traps: dict[int, tuple[int, Callable[[bytes], bytes | None]]] = {}
        self._delay_seconds, self._bytes_per_second = 0.0, float("inf")
        self._listening: list[socket.socket] = []
        self.ports: dict[int, int] = {}
        """The port at which an island reaches the other one."""
        for dialler, other, port in ((*pair, ports[1]), (*pair[::-1], ports[0])):
            listening = socket.create_server(("127.0.0.1", 0), backlog=64)
            self._listening.append(listening)
            self.ports[dialler] = listening.getsockname()[1]
            arguments = listening, dialler, other, port
            threading.Thread(target=self._accept, args=arguments, daemon=True).start()

    def stall(self) -> None:
        """Let nothing through; what is sent waits, as packets that are sent again and again."""
        self._flows.clear()

    def heal(self) -> None:
        """Let everything through again, at full speed."""
        self._delay_seconds, self._bytes_per_second = 0.0, float("inf")
        self._flows.set()

    def slow(self, delay_seconds: float, bytes_per_second: float) -> None:
        """Delay what is sent, and limit its rate."""
        self._delay_seconds, self._bytes_per_second = delay_seconds, bytes_per_second

    def cut(self) -> None:
        """End all connections; new ones may come."""
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def trap(self, sender: int, after_bytes: int, spring: Callable[[bytes], bytes | None]) -> None:
        """Pass what follows `after_bytes` more bytes of a sender to `spring`, once.

        It returns what goes on, or None for nothing, and the end of the connection.
        """
        with self._lock:
            self._traps[sender] = after_bytes, spring

    def close(self) -> None:
        self._closing = True
        for listening in self._listening:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        self.cut()
        self._flows.set()

    def _accept(self, listening: socket.socket, dialler: int, other_end: int, port: int) -> None:
        while not self._closing:
            try:
                dialled, _ = listening.accept()
            except OSError:
                return
            self._flows.wait()
            try:
                other = socket.create_connection(("127.0.0.1", port), timeout=2.0)
                other.settimeout(None)
            except OSError:
                dialled.close()
                continue
            for each in (dialled, other):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._open += [dialled, other]
            left = [2]
            for sender, ways in ((dialler, (dialled, other)), (other_end, (other, dialled))):
                threading.Thread(target=self._pump, args=(sender, *ways, left), daemon=True).start()

    def _pump(self, sender: int, source: socket.socket, to: socket.socket, left: list[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self._flows.wait()
                if self._delay_seconds or self._bytes_per_second < float("inf"):
                    time.sleep(self._delay_seconds + len(data) / self._bytes_per_second)
                passed = self._sprung(sender, data)
                to.sendall(data if passed is None else passed[0])
                if passed is not None and passed[1]:
                    break
        self._flows.wait()
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            left[0] -= 1
            if not left[0]:
                for each in (source, to):
                    self._open.remove(each)
                    each.close()

    def _sprung(self, sender: int, data: bytes) -> tuple[bytes, bool] | None:
        """Return what to send instead, and whether the connection then ends; None: no trap."""
        with self._lock:
            if sender not in self._traps:
                return None
            after, spring = self._traps[sender]
            if after >= len(data):
                self._traps[sender] = after - len(data), spring
                return None
            del self._traps[sender]
        rest = spring(data[after:])
        return data[:after] + (rest or b""), rest is None


class Links:
    """The wires of all pairs of islands, which listen on `ports`."""

    def __init__(self, ports: list[int]) -> None:
        self._ports = ports
        self.wires = {
            (after, before): Wire((after, before), (ports[after], ports[before]))
            for after in range(len(ports))
            for before in range(after)
        }

    def addresses(self, island: int) -> str:
        """Return the addresses of all islands, as one of them reaches them."""
        ports = list(self._ports)
        for pair, wire in self.wires.items():
            if island in pair:
                ports[sum(pair) - island] = wire.ports[island]
        return ",".join(f"127.0.0.1:{port}" for port in ports)

    def between(self, one: Collection[int], other: Collection[int]) -> list[Wire]:
        """Return the wires between two sets of islands."""
        return [
            wire
            for (a, b), wire in self.wires.items()
            if (a in one and b in other) or (b in one and a in other)
        ]

    def close(self) -> None:
        for wire in self.wires.values():
            wire.close()

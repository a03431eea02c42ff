"""The wires between islands: a relay whose connections can be disturbed, pair by pair."""

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Collection

from relay import Relay


class Wire:
    """Everything that flows between two islands, of which each dials the other."""

    def __init__(self, links: "Links", pair: tuple[int, int]) -> None:
        self._links, self.pair = links, pair
        self.flows = threading.Event()
        self.flows.set()
        self._lock = threading.Lock()
        self._traps: dict[int, tuple[int, Callable[[bytes], bytes | None]]] = {}
        self._delay_seconds, self._bytes_per_second = 0.0, math.inf

    def stall(self) -> None:
        """Let nothing through; what is sent waits, as packets that are sent again and again."""
        self.flows.clear()

    def heal(self) -> None:
        """Let everything through again, at full speed."""
        self._delay_seconds, self._bytes_per_second = 0.0, math.inf
        self.flows.set()

    def slow(self, delay_seconds: float, bytes_per_second: float) -> None:
        """Delay what is sent, and limit its rate."""
        self._delay_seconds, self._bytes_per_second = delay_seconds, bytes_per_second

    def cut(self) -> None:
        """End all connections; new ones may come."""
        self._links.cut(self.pair)

    def trap(self, sender: int, after_bytes: int, spring: Callable[[bytes], bytes | None]) -> None:
        """Pass what follows `after_bytes` more bytes of a sender to `spring`, once.

        It returns what goes on, or None for nothing, and the end of the connection.
        """
        with self._lock:
            self._traps[sender] = after_bytes, spring

    def carry(self, sender: int, data: bytes, to: socket.socket) -> None:
        self.flows.wait()
        if self._delay_seconds or self._bytes_per_second < math.inf:
            time.sleep(self._delay_seconds + len(data) / self._bytes_per_second)
        with self._lock:
            after, spring = self._traps.pop(sender, (len(data), None))
            if spring is not None and after >= len(data):
                self._traps[sender] = after - len(data), spring
                spring = None
        if spring is None:
            to.sendall(data)
            return
        rest = spring(data[after:])
        to.sendall(data[:after] + (rest or b""))
        if rest is None:
            raise ConnectionAbortedError


class Links(Relay):
    """The wires of all pairs of islands, which listen on `ports`."""

    def __init__(self, ports: list[int]) -> None:
        pairs = itertools.combinations(range(len(ports)), 2)
        self.wires = {(after, before): Wire(self, (after, before)) for before, after in pairs}
        super().__init__(len(ports), math.inf, 0)
        self.ports = ports

    def hold(self, one: int, other: int) -> None:
        self.between([one], [other])[0].flows.wait()

    def carry(self, sender: int, receiver: int, data: memoryview, to: socket.socket) -> None:
        self.between([sender], [receiver])[0].carry(sender, bytes(data), to)

    def between(self, one: Collection[int], other: Collection[int]) -> list[Wire]:
        """Return the wires between two sets of islands."""
        return [
            wire
            for (a, b), wire in self.wires.items()
            if (a in one and b in other) or (b in one and a in other)
        ]

    def close(self) -> None:
        super().close()
        for wire in self.wires.values():
            wire.flows.set()

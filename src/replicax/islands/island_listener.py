"""The port of an island: few strangers at once, each with little to say and little time."""

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable

from replicax.errors import ClusterError
from replicax.islands.handshake import Handshakes
from replicax.islands.island_place import IslandPlace
from replicax.islands.island_variables import ISLANDS
from replicax.islands.messages import Greeting
from replicax.net.address import split_address
from replicax.net.channel import Channel
from replicax.net.proof import Refusal
from replicax.net.sockets import AGAIN_SECONDS, MORE_STRANGERS, bind_port, connect_to, who_leaves

_BIND_SECONDS = 5.0
"""How long a port may still be in use by an island that is ending."""

Enter = Callable[[Greeting, Channel, Callable[[], None]], None]
"""Called with an island that knows the secret, its connection, and what accepts it."""


class IslandListener:
    """Accepts connections on the port of `place` until `close`.

    `enter` is called in a thread of each visitor that proves that it knows the secret. It owns the
    connection from then on, or raises `ValueError` with the reason for a refusal.
    """

    def __init__(self, place: IslandPlace, handshakes: Handshakes, enter: Enter) -> None:
        self._handshakes, self._enter = handshakes, enter
        self._most = len(place.addresses) + MORE_STRANGERS
        self._strangers: set[Channel] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._threads: list[threading.Thread] = []
        self._listening = listen(place)
        self._begin("replicax-island-listener", self._accept)

    def close(self) -> list[threading.Thread]:
        """Accept no more, and end all connections that are not proven; return what then ends."""
        with self._lock:
            self._closing = True
            strangers, threads = list(self._strangers), self._threads
        with contextlib.suppress(OSError):  # wakes `accept`, which closing the socket does not
            self._listening.shutdown(socket.SHUT_RDWR)
        for stranger in strangers:
            stranger.end()
        return threads

    def _begin(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        with self._lock:  # who closes may join whatever it finds
            thread.start()  # `RuntimeError` if the system has no thread left
            self._threads = [*(each for each in self._threads if each.is_alive()), thread]

    def _accept(self) -> None:
        with self._listening:
            while not self._closing:
                try:
                    connected, _ = self._listening.accept()
                    self._take(connected)
                except (OSError, RuntimeError):  # no descriptor or no thread left
                    if not self._closing:
                        time.sleep(AGAIN_SECONDS)

    def _take(self, connected: socket.socket) -> None:
        stranger = Channel(connected)
        with self._lock:
            closing = self._closing  # or `close` finds the stranger, and ends it
            if (leaves := who_leaves(self._strangers, self._most)) is not None:
                self._strangers.remove(leaves)
                leaves.end()
            self._strangers.add(stranger)
        try:
            if closing:
                raise ConnectionAbortedError
            self._begin("replicax-island-visitor", self._visit, stranger)
        except BaseException:
            self._leave(stranger)
            stranger.close()
            raise

    def _visit(self, stranger: Channel) -> None:
        try:
            hello, proof = self._handshakes.answer(stranger)
        except (OSError, ValueError):
            stranger.close()
            return
        finally:
            self._leave(stranger)

        def accept() -> None:
            stranger.send(proof)
            stranger.limit(None)

        try:
            self._enter(hello, stranger, accept)
        except ValueError as refusal:
            with contextlib.suppress(OSError):
                stranger.send(Refusal(str(refusal)))
            stranger.close()
        except OSError:
            stranger.close()

    def _leave(self, stranger: Channel) -> None:
        with self._lock:
            self._strangers.discard(stranger)


def listen(place: IslandPlace) -> socket.socket:
    """Return a socket that listens on the island's own port.

    `ClusterError` if the port stays in use for seconds, or the address is not this host's.
    """
    address = place.addresses[place.index]
    host, port = split_address(address, ISLANDS)
    deadline = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return bind_port(host, port, listens=True)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise ClusterError(
                    f"island {place.index} cannot listen on {address}: {error.strerror}; each "
                    f"island needs its own port: stop the other program, or change {ISLANDS}"
                ) from None
        time.sleep(AGAIN_SECONDS)


def connect(address: str, seconds: float) -> Channel:
    """Return a connection to `address`; `OSError` if there is none within `seconds`."""
    return Channel(connect_to(*split_address(address, ISLANDS), seconds))

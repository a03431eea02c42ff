"""Networks of several islands in one process, which note what they are told; and raw islands."""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from support.waiting import until

from replicax.islands.handshake import PURPOSES, Handshakes
from replicax.islands.island_listener import connect
from replicax.islands.island_network import Network
from replicax.islands.island_place import IslandPlace
from replicax.islands.messages import Beat, Control, Frame, State
from replicax.islands.peer import IslandPeer
from replicax.launch.process import free_port
from replicax.net.channel import Channel
from replicax.net.secret import Secret

SECRET = Secret(b"the secret of these islands")


def places(count: int) -> list[IslandPlace]:
    """Return the places of islands on free ports.

    Their job is theirs alone: until they listen, other tests may be given the same ports.
    """
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    addresses = tuple(f"127.0.0.1:{port}" for port in ports)
    job = secrets.token_hex(8)
    return [IslandPlace(index, addresses, job, SECRET) for index in range(count)]


class Island:
    """A network, and what it was told, in order."""

    def __init__(self, place: IslandPlace, patience_seconds: float = 60.0) -> None:
        self.place = place
        self.told: list[tuple[Any, ...]] = []
        """`("joined", index, start)`, `("heard", index, message)`, `("lost", index, reason)`."""
        self.arrived: list[tuple[int, Frame | State, list[np.ndarray]]] = []
        self.network = Network(
            place,
            patience_seconds=patience_seconds,
            joined=lambda peer: self._note("joined", peer, peer.start),
            heard=self._heard,
            arrived=self._arrived,
            lost=lambda peer, reason: self._note("lost", peer, reason),
        )

    def peer(self, index: int) -> IslandPeer:
        """Return a peer once it has joined."""
        found: IslandPeer = until(lambda: self.network.peers.get(index))
        return found

    def only(self, kind: str) -> list[tuple[Any, ...]]:
        """Return what it was told of one kind, without the kind."""
        return [told[1:] for told in list(self.told) if told[0] == kind]

    def _heard(self, peer: IslandPeer, message: Control) -> None:
        self._note("heard", peer, message)

    def _arrived(self, peer: IslandPeer, header: Frame | State, arrays: list[np.ndarray]) -> None:
        self.arrived.append((peer.index, header, arrays))

    def _note(self, kind: str, peer: IslandPeer, what: Any) -> None:
        self.told.append((kind, peer.index, what))


@contextlib.contextmanager
def islands(given: Sequence[IslandPlace], patience_seconds: float = 60.0) -> Iterator[list[Island]]:
    """Start islands in this order, and close them in the end."""
    with contextlib.ExitStack() as stack:
        started = []
        for place in given:
            started.append(Island(place, patience_seconds))
            stack.callback(started[-1].network.close)
        yield started


def connected(place_count: int, networks: Sequence[Network]) -> None:
    """Wait until all islands of these networks are joined to each other."""
    until(lambda: all(len(each.peers) == place_count - 1 for each in networks))


class RawIsland:
    """An island that dials and does nothing more: its connections are for a test to misuse."""

    def __init__(self, place: IslandPlace, other: int = 0) -> None:
        self.place, self.other = place, other
        self._handshakes = Handshakes(place, "raw")
        self._channels: list[Channel] = []

    def dial(self, purpose: str) -> Channel:
        """Return a connection, once the handshake is done; `ValueError` if it is refused."""
        channel = connect(self.place.addresses[self.other], 10.0)
        self._channels.append(channel)
        self._handshakes.dial(channel, self.other, purpose)  # type: ignore[arg-type]
        return channel

    def join(self) -> tuple[Channel, Channel]:
        """Return both connections."""
        control, data = map(self.dial, PURPOSES)
        if self.place.index < self.other:  # it decides which connections count
            control.send(Beat())
        return control, data

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

"""The connections at process 0: few strangers at once, each with little to say."""

import asyncio
import socket
from collections.abc import Callable

from replicax.cluster import wire
from replicax.net.message import Received, encode
from replicax.net.sockets import AGAIN_SECONDS, MORE_STRANGERS, who_leaves

HELLO_SECONDS = 10.0
"""Timeout for the first message on a new connection."""


class Peer(asyncio.Protocol):
    """The other end of a connection: a stranger until it is admitted as a process.

    `hear` is called with each message, and may raise `ValueError` to end the connection; `lost`
    once it has ended.
    """

    def __init__(
        self, hear: Callable[["Peer", wire.Message], None], lost: Callable[["Peer"], None]
    ) -> None:
        self.process: int | None = None
        """Its rank, once it is admitted."""
        self.said: tuple[wire.Hello, wire.Prove] | None = None
        """Its first message, and the answer; the proof of the secret is for both."""
        self._hear, self._lost = hear, lost
        self._received = Received(wire.LONGEST_HELLO_BYTES)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._leaves = asyncio.get_running_loop().call_later(HELLO_SECONDS, self.close)

    def data_received(self, data: bytes) -> None:
        self._received.feed(data)
        try:
            while not self._transport.is_closing() and (text := self._received.take()) is not None:
                self._hear(self, wire.decode(text))
        except ValueError:  # not a process of Replicax
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._leaves.cancel()
        self._lost(self)

    def admit(self, process: int) -> None:
        """Let it stay and send long messages."""
        self.process = process
        self._leaves.cancel()
        self._received.most_bytes = wire.LONGEST_VALUE_BYTES

    def send(self, message: wire.Message) -> None:
        """Send `message`, unless the connection has ended."""
        self._transport.write(encode(message))

    def close(self) -> None:
        """End the connection, once everything is sent."""
        self._transport.close()


class JobListener:
    """Accepts connections; `close` ends all of them."""

    def __init__(
        self,
        processes: int,
        hear: Callable[[Peer, wire.Message], None],
        lost: Callable[[Peer], None],
    ) -> None:
        self._most, self._lost = processes + MORE_STRANGERS, lost
        self._peers: set[Peer] = set()
        self._hear = hear

    async def serve(self, listening: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            # One at a time: a server of asyncio accepts a hundred before it looks at the first,
            # and prints a traceback for each that finds no descriptor.
            try:
                connected, _ = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            strangers = [peer for peer in self._peers if peer.process is None]
            if (leaves := who_leaves(strangers, self._most)) is not None:
                leaves.send(wire.Busy())  # it may be a process, which tries again
                leaves.close()
            _, peer = await loop.connect_accepted_socket(
                lambda: Peer(self._hear, self._forget), connected
            )
            self._peers.add(peer)
            await asyncio.sleep(0)  # a flood leaves time for the processes

    def close(self) -> None:
        """End all connections."""
        for peer in self._peers:
            peer.close()

    def _forget(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._lost(peer)

"""Strangers at the port of an island: each says something hostile or nothing, and stays or goes."""

import contextlib
import random
import socket
import struct
from collections import deque

import msgspec

from replicax.islands.frames import message_bytes
from replicax.islands.island_place import IslandPlace
from replicax.islands.messages import HANDSHAKE, Beat, Frame, Greeting
from replicax.net.message import PREFIX_BYTES, prefixed
from replicax.net.proof import DIALS, Proof, proof
from replicax.net.secret import Secret

MOST_OPEN = 24
"""Connections that the strangers keep open."""
RESET = struct.pack("ii", 1, 0)
"""Close without waiting until all is sent."""


class IslandStrangers:
    """Draws what strangers do at `port`, who know all of `place` but the secret."""

    def __init__(self, place: IslandPlace, port: int, seed: int) -> None:
        self._place, self._address = place, ("127.0.0.1", port)
        self._chance = random.Random(seed)
        self._open: deque[socket.socket] = deque()

    def come(self) -> None:
        """Add a stranger; the oldest one leaves."""
        stranger = socket.create_connection(self._address, timeout=10.0)
        self._open.append(stranger)
        with contextlib.suppress(OSError, ValueError):
            self._chance.choice([self._says, self._says, self._answers])(stranger)
        if self._chance.random() < 0.3:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        if self._chance.random() < 0.5:
            self._open.remove(stranger)
            stranger.close()
        while len(self._open) > MOST_OPEN:
            self._open.popleft().close()

    def leave(self) -> None:
        """Close all connections."""
        while self._open:
            self._open.popleft().close()

    def _says(self, stranger: socket.socket) -> None:
        """Say something at once."""
        chance = self._chance
        hello = message_bytes(self._hello())
        stranger.sendall(
            chance.choice(
                [
                    *(b"", b"\0", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(300)),
                    *(prefixed(b"x" * 4097)[:PREFIX_BYTES], prefixed(b"[" * 4096)),
                    *(b"\xff" * 100_000, prefixed(b"{}"), message_bytes(Beat())),
                    *(message_bytes(Frame(0, 0, [], "")), message_bytes(Proof("0" * 64))),
                    *(hello, hello[: chance.randrange(len(hello))], hello * 3),
                    hello.replace(b"control", b"\xff\xfe\xfd control"),
                ]
            )
        )

    def _answers(self, stranger: socket.socket) -> None:
        """Go on to a wrong proof."""
        hello = self._hello()
        stranger.sendall(message_bytes(hello))
        stranger.settimeout(0.5)
        challenge = HANDSHAKE.decode(stranger.recv(1 << 12)[PREFIX_BYTES:])
        assert isinstance(challenge, Greeting)
        guess = proof(Secret(self._chance.randbytes(8)), DIALS, hello, challenge)
        said = self._chance.choice([guess, Proof(""), Proof("ä"), Proof(challenge.nonce)])
        stranger.sendall(message_bytes(said))

    def _hello(self) -> Greeting:
        chance, count = self._chance, len(self._place.addresses)
        hello = Greeting(
            chance.choice([self._place.job, self._place.job, "theirs"]),
            chance.randrange(-1, count + 1),
            chance.choice([count, count, count + 1, 0]),
            chance.choice(["", "start", "x" * 3000]),
            chance.choice(["control", "data", ""]),
            chance.choice(["", "n" * 32]),
        )
        return msgspec.structs.replace(hello, pid=chance.choice([0, -1, 2**63 - 1]))

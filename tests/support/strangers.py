"""Strangers at the port of a job: each connects, sends something hostile or nothing, and leaves."""

import contextlib
import json
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from replicax.cluster.watchdog import Heartbeat, StuckVerdict
from replicax.cluster.wire import (
    Busy,
    Bye,
    Failed,
    Gather,
    Gathered,
    Go,
    Hello,
    Message,
    Prove,
    Tick,
    Withdraw,
    decode,
)
from replicax.islands.messages import Greeting
from replicax.net.message import Received, encode, prefixed, to_json
from replicax.net.proof import DIALS, Proof, Refusal, proof
from replicax.net.secret import Secret

MOST_OPEN = 24
"""Connections that the strangers keep open."""
LONGEST_BYTES = 1 << 20
SECONDS = 0.5
RESET = struct.pack("ii", 1, 0)
"""Close without waiting until all is sent."""
VALUES: list[object] = [
    *(None, True, -1, 0, 1, 2**63, 1e308, 0.5, "", "1", "\u0000", "ä", "x" * 5000),
    *([], {}, [[1]], {"a": {"b": []}}, list(range(500)), {"jax": 3}, [None], "Hello"),
]


class Strangers:
    """Draws what strangers do at `port` of the job `job`, whose secret they do not know."""

    decode: Callable[[bytes], Any] = staticmethod(decode)

    def __init__(self, port: int, job: str, processes: int, seed: int) -> None:
        self._address, self._job, self._processes = ("127.0.0.1", port), job, processes
        self._chance = random.Random(seed)
        self._open: deque[socket.socket] = deque()
        self.refused = 0
        """Connections that the system or the job closed while the stranger spoke."""
        self.let_in = 0
        """Strangers that were taken for a process."""

    def come(self) -> None:
        """Add a stranger; the oldest one leaves."""
        leaves = self._chance.choice([self._goes, self._resets, self._stays, self._listens])
        stranger = socket.create_connection(self._address, timeout=SECONDS)
        self._open.append(stranger)
        try:
            if self._chance.random() < 0.2:
                self._answers(stranger)
            else:
                for piece in self._pieces(self._said()):
                    stranger.sendall(piece)
            leaves(stranger)
        except (OSError, ValueError):
            self.refused += 1
            self._goes(stranger)
        while len(self._open) > MOST_OPEN:
            self._goes(self._open[0])

    def leave(self) -> None:
        """Close all connections."""
        while self._open:
            self._goes(self._open[0])

    def _answers(self, stranger: socket.socket) -> None:
        """Go on to a wrong proof, as who knows the secret would to the right one."""
        hello, received = self._hello(), Received(1 << 16)
        stranger.sendall(encode(hello))
        received.feed(stranger.recv(1 << 12))
        challenge = self.decode(received.take() or b"")
        if isinstance(challenge, Prove | Greeting):
            guess = proof(Secret(self._chance.randbytes(8)), DIALS, hello, challenge)
            said = self._chance.choice([guess, Proof(challenge.nonce), Proof(""), Proof("ä")])
            stranger.sendall(encode(said))
            received.feed(stranger.recv(1 << 12))
            self.let_in += isinstance(self.decode(received.take() or b""), Proof)

    def _goes(self, stranger: socket.socket) -> None:
        self._open.remove(stranger)
        stranger.close()

    def _resets(self, stranger: socket.socket) -> None:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._goes(stranger)

    def _stays(self, stranger: socket.socket) -> None:
        pass

    def _listens(self, stranger: socket.socket) -> None:
        stranger.settimeout(0.01)
        with contextlib.suppress(TimeoutError):
            stranger.recv(1 << 16)

    def _pieces(self, said: bytes) -> list[bytes]:
        cut = self._chance.randrange(len(said) + 1) if self._chance.random() < 0.2 else 0
        return [said[:cut], said[cut:]]

    def _said(self) -> bytes:
        kinds: list[Callable[[], bytes]] = [
            *(self._wrong_secret, self._wrong_types, self._flipped, self._another_kind),
            *(self._deep, self._long, self._noise, self._nothing, self._many),
        ]
        return self._chance.choice(kinds)()

    def _hello(self) -> Any:
        job = self._chance.choice([self._job, self._job, "", "theirs"])
        process = self._chance.randrange(-1, self._processes + 1)
        versions = {"jax": "0"}
        asks = self._chance.random() < 0.2
        hello = Hello(job, process, self._processes, "h", 1, versions, asks=asks)
        return msgspec.structs.replace(hello, nonce=self._chance.choice(["", "ä", "x" * 70_000]))

    def _wrong_secret(self) -> bytes:
        """A guess that does not wait for the nonce of the other end."""
        hello, key = self._hello(), Secret(self._chance.choice([b"", b"guess"]))
        guess = proof(key, DIALS, hello, Prove(""))
        return encode(hello) + encode(self._chance.choice([guess, Proof(""), Proof("ä"), hello]))

    def _wrong_types(self) -> bytes:
        fields = json.loads(to_json(self._hello()))
        for _ in range(self._chance.randrange(1, 4)):
            fields[self._chance.randrange(len(fields))] = self._chance.choice(VALUES)
        count = self._chance.randrange(len(fields) + 1)
        return prefixed(json.dumps([*fields[:count], *([None] * (count % 3))]).encode())

    def _flipped(self) -> bytes:
        line = bytearray(encode(self._hello()))
        for _ in range(self._chance.randrange(1, 4)):
            line[self._chance.randrange(len(line))] ^= 1 << self._chance.randrange(8)
        return bytes(line)

    def _another_kind(self) -> bytes:
        messages: list[Message] = [
            *(Heartbeat(9, 9), Gather("t", "1"), Withdraw("t"), Failed("x", False), Bye(), Busy()),
            *(Prove("n"), Proof("0" * 64)),
            *(StuckVerdict("stop", [0]), Refusal("no"), Tick([]), Go(["a"]), Gathered("t", ["1"])),
        ]
        return encode(self._chance.choice(messages))

    def _deep(self) -> bytes:
        deep = self._chance.choice([b"[", b'{"a":', b'["Hello",'])
        return prefixed(deep * self._chance.choice([500, 5_000, 60_000 // len(deep), 200_000]))

    def _long(self) -> bytes:
        byte = self._chance.choice([b"x", b"[", b"1", b" ", b'"'])
        text = byte * self._chance.randrange(60_000, LONGEST_BYTES)
        return self._chance.choice([text, prefixed(text)])

    def _noise(self) -> bytes:
        noise = self._chance.randbytes(self._chance.randrange(5_000))
        return self._chance.choice([noise, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"\n", b"\0\n"])

    def _nothing(self) -> bytes:
        return b""

    def _many(self) -> bytes:
        return b"".join(self._another_kind() for _ in range(100))

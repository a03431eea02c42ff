"""Strangers at the port of an island: each says something hostile or nothing, and stays or goes."""

import msgspec
from support.strangers import Strangers

from replicax.islands.frames import message_bytes
from replicax.islands.island_place import IslandPlace
from replicax.islands.messages import HANDSHAKE, Beat, Frame, Greeting
from replicax.net.message import PREFIX_BYTES, prefixed
from replicax.net.proof import Proof


class IslandStrangers(Strangers):
    """Draws what strangers do at `port`, who know all of `place` but the secret."""

    decode = staticmethod(HANDSHAKE.decode)

    def __init__(self, place: IslandPlace, port: int, seed: int) -> None:
        super().__init__(port, place.job, len(place.addresses), seed)

    def _said(self) -> bytes:
        hello = message_bytes(self._hello())
        said = [
            *(b"", b"\0", b"\0" * 100, b"GET / HTTP/1.1\r\n\r\n", self._chance.randbytes(300)),
            *(prefixed(b"x" * 4097)[:PREFIX_BYTES], prefixed(b"[" * 4096)),
            *(b"\xff" * 100_000, prefixed(b"{}"), message_bytes(Beat())),
            *(message_bytes(Frame(0, 0, [], "")), message_bytes(Proof("0" * 64))),
            *(hello, hello[: self._chance.randrange(len(hello))], hello * 3),
            hello.replace(b"control", b"\xff\xfe\xfd control"),
        ]
        return self._chance.choice(said)

    def _hello(self) -> Greeting:
        chance, count = self._chance, self._processes
        hello = Greeting(
            chance.choice([self._job, self._job, "theirs"]),
            chance.randrange(-1, count + 1),
            chance.choice([count, count, count + 1, 0]),
            chance.choice(["", "start", "x" * 3000]),
            chance.choice(["control", "data", ""]),
            chance.choice(["", "n" * 32]),
        )
        return msgspec.structs.replace(hello, pid=chance.choice([0, -1, 2**63 - 1]))

"""The handshake of two islands: each says who it is, and proves that it knows the job's secret.

The first message of each is a Greeting; `net/proof.py` has what follows.
"""

import os
import socket
from typing import Literal, TypeVar, get_args

from replicax.cluster.same_system import boot
from replicax.islands.island_place import IslandPlace
from replicax.islands.messages import HANDSHAKE, Greeting
from replicax.net.channel import Channel
from replicax.net.message import read_message
from replicax.net.proof import (
    DIALS,
    LISTENS,
    Proof,
    Refusal,
    RefusedError,
    check_proof,
    nonce,
    proof,
)

HANDSHAKE_SECONDS = 5.0
"""Timeout for a whole handshake."""
LONGEST_HANDSHAKE_BYTES = 4096
"""The limit for each message of a handshake, which may come from anyone."""
Purpose = Literal["control", "data", "inquiry"]
INQUIRES: Purpose = "inquiry"
PURPOSES: tuple[Purpose, ...] = ("control", "data")
"""The connections of a pair."""
Expected = TypeVar("Expected", Greeting, Proof)


class Handshakes:
    """Introduces one start of the island at `place` to others."""

    def __init__(self, place: IslandPlace, start: str) -> None:
        self._place, self._start = place, start
        self._host, self._boot, self._pid = socket.gethostname()[:255], boot(), os.getpid()

    def dial(self, channel: Channel, other: int, purpose: Purpose) -> Greeting:
        """Return what the island `other`, which was dialled, says of itself, once it is proven.

        `ValueError` if it is not that island, or refuses.
        """
        channel.limit(HANDSHAKE_SECONDS)
        place = self._place
        hello = self._greeting(purpose)
        channel.send(hello)
        challenge = _receive(channel, Greeting)
        if challenge.job != place.job:
            raise ValueError("another job")
        if (challenge.island, challenge.islands) != (other, len(place.addresses)):
            raise ValueError(
                f"island {challenge.island} of {challenge.islands} answers at the address of "
                f"island {other} of {len(place.addresses)}"
            )
        channel.send(proof(place.secret, DIALS, hello, challenge))
        check_proof(_receive(channel, Proof), proof(place.secret, LISTENS, hello, challenge))
        channel.limit(None)
        return challenge

    def answer(self, channel: Channel) -> tuple[Greeting, Proof]:
        """Return what an island that has dialled says of itself, and the proof to accept it with.

        It knows the secret, and may learn why it is refused. `ValueError` if it is a stranger.
        """
        channel.limit(HANDSHAKE_SECONDS)
        hello = _receive(channel, Greeting)
        place = self._place
        if hello.job != place.job:
            raise ValueError("another job")
        challenge = self._greeting()
        channel.send(challenge)
        check_proof(_receive(channel, Proof), proof(place.secret, DIALS, hello, challenge))
        return hello, proof(place.secret, LISTENS, hello, challenge)

    def _greeting(self, purpose: str = "") -> Greeting:
        place = self._place
        return Greeting(
            *(place.job, place.index, len(place.addresses), self._start, purpose, nonce()),
            *(self._host, self._boot, self._pid),
        )

    def refusal(self, hello: Greeting) -> str | None:
        """Return why an island that knows the secret is no other island of this job."""
        index, islands = self._place.index, len(self._place.addresses)
        if hello.islands != islands:
            return f"the job has {islands} islands, but this one was given {hello.islands}"
        if hello.island == index or not 0 <= hello.island < islands:
            return f"island {index} of {islands} is dialled by the others, not by {hello.island}"
        if hello.purpose not in get_args(Purpose):
            return f"connections are for {' or '.join(get_args(Purpose))}, not {hello.purpose}"
        return None


def _receive(channel: Channel, kind: type[Expected]) -> Expected:
    message = read_message(channel.receive(LONGEST_HANDSHAKE_BYTES), HANDSHAKE)
    if isinstance(message, Refusal):
        raise RefusedError(message.reason)
    if not isinstance(message, kind):
        raise ValueError(f"{type(message).__name__} instead of {kind.__name__}")
    return message

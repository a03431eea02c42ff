"""The handshake of two islands: each proves that it knows the job's secret, for this connection.

Greeting and Challenge carry a random nonce each; a Proof is an HMAC of both messages and of the
role of its sender, so that it serves for no other connection, and not for the other role. What
follows is neither encrypted nor signed: as in the rest of Replicax, the network itself is trusted.
"""

import hmac
import os
import secrets
import socket
from typing import Literal, TypeVar, get_args

import msgspec

from replicax.cluster.same_system import boot
from replicax.cluster.secret import Secret
from replicax.islands.frames import Channel
from replicax.islands.island_place import IslandPlace
from replicax.islands.messages import HANDSHAKE, Challenge, Greeting, Proof, Refusal

HANDSHAKE_SECONDS = 5.0
"""Timeout for a whole handshake."""
LONGEST_HANDSHAKE_BYTES = 4096
"""The limit for each message of it, which may come from anyone."""
Purpose = Literal["control", "data", "inquiry"]
INQUIRES: Purpose = "inquiry"
PURPOSES: tuple[Purpose, ...] = ("control", "data")
"""The connections of a pair."""
DIALS, LISTENS = "replicax-island-dials", "replicax-island-listens"
"""Roles in a handshake."""
Expected = TypeVar("Expected", Greeting, Challenge, Proof)


class RefusedError(ValueError):
    """The refusal of a connection by the island that was dialled."""


class Handshakes:
    """Introduces one start of the island at `place` to others."""

    def __init__(self, place: IslandPlace, start: str) -> None:
        self._place, self._start = place, start
        self._host, self._boot, self._pid = socket.gethostname()[:255], boot(), os.getpid()

    def dial(self, channel: Channel, other: int, purpose: Purpose) -> Challenge:
        """Return what the island `other`, which was dialled, says of itself, once it is proven.

        `ValueError` if it is not that island, or refuses.
        """
        channel.limit(HANDSHAKE_SECONDS)
        place = self._place
        hello = Greeting(
            *(place.job, place.index, len(place.addresses), self._start, purpose, _nonce()),
            *(self._host, self._boot, self._pid),
        )
        channel.send(hello)
        challenge = _receive(channel, Challenge)
        if challenge.job != place.job:
            raise ValueError("another job")
        if (challenge.island, challenge.islands) != (other, len(place.addresses)):
            raise ValueError(
                f"island {challenge.island} of {challenge.islands} answers at the address of "
                f"island {other} of {len(place.addresses)}"
            )
        channel.send(Proof(proof(place.secret, DIALS, hello, challenge)))
        _check(_receive(channel, Proof), proof(place.secret, LISTENS, hello, challenge))
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
        challenge = Challenge(
            *(place.job, place.index, len(place.addresses), self._start, _nonce()),
            *(self._host, self._boot, self._pid),
        )
        channel.send(challenge)
        _check(_receive(channel, Proof), proof(place.secret, DIALS, hello, challenge))
        return hello, Proof(proof(place.secret, LISTENS, hello, challenge))

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


def proof(secret: Secret, role: str, hello: Greeting, challenge: Challenge) -> str:
    """Return the proof of who has `role` in the handshake that began with these messages."""
    return secret.hmac(msgspec.json.encode([role, hello, challenge]))


def _nonce() -> str:
    return secrets.token_hex(16)


def _receive(channel: Channel, kind: type[Expected]) -> Expected:
    text = channel.receive(LONGEST_HANDSHAKE_BYTES)
    try:
        message = HANDSHAKE.decode(text)
    except RecursionError:
        raise ValueError("a message is not nested deeply") from None
    if isinstance(message, Refusal):
        raise RefusedError(message.reason)
    if not isinstance(message, kind):
        raise ValueError(f"{type(message).__name__} instead of {kind.__name__}")
    return message


def _check(given: Proof, expected: str) -> None:
    if not hmac.compare_digest(given.hmac.encode(errors="replace"), expected.encode()):
        raise ValueError("the secret differs")

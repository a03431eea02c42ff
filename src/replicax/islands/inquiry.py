"""Questions of `replicax doctor` to an island: how far away it is, and what its clock shows.

They come on a connection of their own, after the usual handshake, and change nothing.
"""

import time
from dataclasses import dataclass

from replicax.islands.messages import INQUIRY, Answer, Question
from replicax.net.channel import Channel
from replicax.net.message import encode, read_message

ROUNDS = 8
MOST_BYTES = 1 << 26
"""The limit for what follows a question."""
_SECONDS = 120.0
"""Timeout for a whole inquiry, as the one who asks may vanish."""
_FIRST_BYTES, _LAST_BYTES = 1 << 18, 1 << 22
_LONGEST_SECONDS = 10.0
"""How long the last bytes may take, by the rate of the first."""


@dataclass(frozen=True)
class Distance:
    """Result of an inquiry."""

    trains: bool
    """Whether the other end is an island of a program, and not `replicax doctor`."""
    round_trip_seconds: float
    """The shortest of several."""
    ahead_seconds: float
    """The other clock minus this one, to within half of a round trip."""


def inquire(channel: Channel) -> Distance:
    """Ask the other end several times.

    `OSError` if the connection has ended, `ValueError` if it does not follow the protocol.
    """
    channel.limit(_SECONDS)
    distances = []
    for _ in range(ROUNDS):
        asked = time.time()
        began = time.monotonic()
        answer = _ask(channel)
        seconds = time.monotonic() - began
        distances.append(Distance(answer.trains, seconds, answer.time - (asked + seconds / 2)))
    return min(distances, key=lambda distance: distance.round_trip_seconds)


def bytes_per_second(channel: Channel, round_trip_seconds: float) -> float:
    """Return the rate at which another `replicax doctor` receives a few MB; raises as `inquire`."""
    size, rate = _FIRST_BYTES, 0.0
    while True:
        began = time.monotonic()
        _ask(channel, bytes(size))
        seconds = time.monotonic() - began
        # This round trip may have been shorter than the one that is known.
        rate = size / max(seconds - round_trip_seconds, seconds / 10)
        if size == _LAST_BYTES or _LAST_BYTES / rate > _LONGEST_SECONDS:
            return rate
        size = _LAST_BYTES


def answer_inquiry(channel: Channel, *, trains: bool) -> None:
    """Answer until the other end closes; `OSError` or `ValueError` tells why it ends."""
    channel.limit(_SECONDS)
    while True:
        question = read_message(channel.receive(), INQUIRY)
        if not isinstance(question, Question):
            raise ValueError("an answer without a question")
        if not 0 <= question.bytes <= (0 if trains else MOST_BYTES):
            raise ValueError(f"{question.bytes} bytes after a question")
        channel.skip(question.bytes)
        channel.send(Answer(time.time(), trains))


def _ask(channel: Channel, data: bytes = b"") -> Answer:
    channel.send_bytes([encode(Question(len(data))), data])
    answer = read_message(channel.receive(), INQUIRY)
    if not isinstance(answer, Answer):
        raise ValueError("a question instead of an answer")
    return answer

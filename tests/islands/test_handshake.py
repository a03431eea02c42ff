"""The handshake: whoever does not know the secret is refused, whatever bytes come from there."""

import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arriving import Arriving, drawn, harmed
from support.island_networks import SECRET

from replicax.islands.frames import message_bytes
from replicax.islands.handshake import (
    LONGEST_HANDSHAKE_BYTES,
    Handshakes,
)
from replicax.islands.inquiry import answer_inquiry, inquire
from replicax.islands.island_place import IslandPlace
from replicax.islands.messages import (
    HANDSHAKE,
    INQUIRY,
    Answer,
    Greeting,
    Question,
)
from replicax.net.channel import Channel
from replicax.net.message import PREFIX_BYTES, prefixed
from replicax.net.proof import DIALS, LISTENS, Proof, Refusal, RefusedError, proof
from replicax.net.secret import Secret

Handshake = Greeting | Proof | Refusal
SAID = drawn(Handshake).map(message_bytes)
STRANGE = st.lists(SAID | harmed(SAID) | st.binary(max_size=40), max_size=3).map(b"".join)
OURS = [Handshakes(IslandPlace(n, ("a:1", "b:2"), "ours", SECRET), f"start {n}") for n in (0, 1)]
HELLO = Greeting("ours", 1, 2, "start", "control", "n" * 32)


class Replies(Arriving):
    """The other end of a handshake: it says more once it has read what was said to it."""

    def __init__(self, first: bytes, reply: Callable[[Any], bytes]) -> None:
        super().__init__(first)
        self._reply: Callable[[Any], bytes] | None = reply

    def recv_into(self, view: memoryview) -> int:
        if not self._left and self.sent and self._reply is not None:
            reply, self._reply = self._reply, None
            self.more(reply(first(self.sent)))
        return super().recv_into(view)


def first(sent: bytes | bytearray) -> Any:
    """Return the first message in what was sent."""
    return HANDSHAKE.decode(sent[PREFIX_BYTES : PREFIX_BYTES + int.from_bytes(sent[:8])])


def answer(stranger: Arriving) -> tuple[Greeting, Proof]:
    return OURS[0].answer(Channel(stranger))  # type: ignore[arg-type]


@given(STRANGE, st.booleans())
def test_strangers_are_refused_whatever_they_say(said: bytes, dials: bool) -> None:
    stranger = Arriving(said)
    channel = Channel(stranger)  # type: ignore[arg-type]
    with pytest.raises((OSError, ValueError)):
        OURS[0].answer(channel) if dials else OURS[1].dial(channel, 0, "control")
    assert stranger.most_bytes <= LONGEST_HANDSHAKE_BYTES
    assert SECRET.hmac(b"") not in stranger.sent.decode(errors="replace")
    if dials:  # who does not know the job learns nothing
        assert not stranger.sent or b"ours" in said


@given(drawn(Greeting), drawn(Greeting), st.text(max_size=64) | st.binary(max_size=20))
def test_a_proof_serves_for_one_connection_and_one_role(
    greeting: Greeting, another: Greeting, guess: str | bytes
) -> None:
    hello = msgspec.structs.replace(greeting, job="ours")

    def wrong(challenge: Greeting) -> list[Proof]:
        return [
            proof(SECRET, LISTENS, hello, challenge),
            proof(SECRET, DIALS, hello, another),
            proof(SECRET, DIALS, HELLO, challenge),
            proof(Secret(b"x"), DIALS, hello, challenge),
            Proof(guess if isinstance(guess, str) else challenge.nonce),
        ]

    for number in range(5):
        stranger = Replies(message_bytes(hello), lambda c, n=number: message_bytes(wrong(c)[n]))
        with pytest.raises(ValueError, match="secret"):
            answer(stranger)
    right = lambda c: message_bytes(proof(SECRET, DIALS, hello, c))  # noqa: E731
    knows = Replies(message_bytes(hello), right)
    back, own = answer(knows)
    challenge = first(knows.sent)
    assert (back, own) == (hello, proof(SECRET, LISTENS, hello, challenge))


@given(drawn(Greeting), st.booleans())
def test_who_dials_believes_only_the_island_that_it_dialled(told: Greeting, proves: bool) -> None:
    def reply(hello: Greeting) -> bytes:
        key = SECRET if proves else Secret(b"x")
        return message_bytes(proof(key, LISTENS, hello, told))

    for challenge in (told, msgspec.structs.replace(told, job="ours", island=0, islands=2)):
        told = challenge
        stays = Replies(message_bytes(challenge), reply)
        fine = proves and (told.job, told.island, told.islands) == ("ours", 0, 2)
        with contextlib.nullcontext() if fine else pytest.raises(ValueError, match=r"."):
            assert OURS[1].dial(Channel(stays), 0, "data") == told  # type: ignore[arg-type]


def test_a_refusal_is_told_to_who_knows_the_secret() -> None:
    refused = Arriving(message_bytes(Refusal("closed by this island")))
    with pytest.raises(RefusedError, match="closed"):
        OURS[1].dial(Channel(refused), 0, "control")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, None),
        ({"islands": 3}, "2 islands, .* 3"),
        ({"island": 0}, "by 0"),
        ({"island": 2}, "by 2"),
        ({"island": -1}, "by -1"),
        ({"purpose": "inquiry"}, None),
        ({"purpose": "shell"}, "control or data or inquiry, not shell"),
    ],
)
def test_an_island_that_does_not_belong_here_learns_why(change: Any, named: str | None) -> None:
    told = OURS[0].refusal(msgspec.structs.replace(HELLO, **change))
    assert (told is None) is (named is None)
    if named is not None:
        with pytest.raises(AssertionError, match=named):
            raise AssertionError(told)


ASKED = drawn(Question | Answer).map(message_bytes)


@given(st.lists(ASKED | harmed(ASKED) | st.just(prefixed(b"[" * 5000)), max_size=3).map(b"".join))
def test_an_inquiry_ends_its_connection_only(said: bytes) -> None:
    for serve in (inquire, lambda channel: answer_inquiry(channel, trains=True)):
        stranger = Arriving(said)
        with contextlib.suppress(OSError, ValueError):
            serve(Channel(stranger))  # type: ignore[arg-type]
        told = Channel(Arriving(bytes(stranger.sent)))  # type: ignore[arg-type]
        with contextlib.suppress(ConnectionError):
            while INQUIRY.decode(told.receive()):
                pass

"""An island exchanges nothing with those who do not know the secret, or break the protocol."""

import contextlib
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from support.figures import logged
from support.island_networks import Island, RawIsland, islands, places
from support.island_strangers import IslandStrangers
from support.waiting import until

from replicax.islands.frames import frame_parts, message_bytes
from replicax.islands.island_listener import connect
from replicax.islands.messages import Beat, Frame
from replicax.net.message import PREFIX_BYTES, prefixed
from replicax.net.secret import Secret
from replicax.net.sockets import MORE_STRANGERS

FRAME = Frame(1, 2, [(0, 1)], "null")


def test_second_connections_are_refused(raw: tuple[Island, RawIsland]) -> None:
    island, other = raw
    with pytest.raises(ValueError, match="first"):
        other.dial("data")
    control = other.dial("control")
    with pytest.raises(ValueError, match="already"):
        other.dial("control")
    control.end()
    until(lambda: control.has_ended())
    other.join()  # the first one has ended
    for purpose in ("control", "data"):
        with pytest.raises(ValueError, match="already"):
            other.dial(purpose)
    assert until(lambda: island.only("joined")) == [(1, "raw")]
    assert not island.only("lost")


@pytest.mark.parametrize(
    ("purpose", "sent"),
    [
        (0, b"junk " * 5),
        (0, prefixed(b"[]")),
        (0, prefixed(b"[]")[:8] + bytes(PREFIX_BYTES - 8)),
        (0, prefixed(b"[" * 100_000)),
        (0, message_bytes(FRAME)),
        (1, message_bytes(Beat())),
        (1, message_bytes(msgspec.structs.replace(frame_parts(FRAME, [])[0], crc=1))),
        (1, message_bytes(msgspec.structs.replace(FRAME, arrays=[("complex64", [1])]))),
        (1, message_bytes(msgspec.structs.replace(FRAME, arrays=[("int8", [1 << 40])]))),
        (1, message_bytes(msgspec.structs.replace(FRAME, arrays=[("int8", [4])])) + b"abcd"),
    ],
)
def test_who_breaks_the_protocol_is_lost(
    purpose: int, sent: bytes, raw: tuple[Island, RawIsland]
) -> None:
    island, other = raw
    channels = other.join()
    island.peer(1)
    channels[purpose].send_bytes([sent])
    ((index, reason),) = until(lambda: island.only("lost"))
    assert index == 1
    assert "protocol" in reason
    assert not island.arrived
    assert not island.only("heard")


@pytest.mark.promise("islands.strangers")
def test_an_island_with_another_secret_says_why_it_does_not_join() -> None:
    first, second = places(2)
    wrong = replace(second, secret=Secret(b"another"))
    with islands([first, wrong]) as (one, other):
        until(lambda: other.network.troubles)
        assert not one.told
        assert not other.told
        other.network.close()
        with islands([second]):
            one.peer(1)


def test_few_strangers_are_open_at_once() -> None:
    first, second = places(2)
    with islands([first]) as (island,), contextlib.ExitStack() as stack:
        strangers = []
        for _ in range(60):
            strangers.append(connect(first.addresses[0], 10.0))
            stack.callback(strangers[-1].close)
        until(lambda: sum(not each.has_ended() for each in strangers) == 2 + MORE_STRANGERS)
        with islands([second]):  # it takes the place of one of them
            island.peer(1)


def test_slow_strangers_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicax.islands.handshake.HANDSHAKE_SECONDS", 0.4)
    (first,) = places(1)
    with islands([first]):
        slow = connect(first.addresses[0], 10.0)
        started = time.monotonic()
        for byte in prefixed(b"x" * 100):
            if slow.has_ended():
                break
            with contextlib.suppress(OSError):
                slow.send_bytes([bytes([byte])])
            time.sleep(0.05)
        assert slow.has_ended()
        assert 0.3 < time.monotonic() - started < 5.0
        slow.close()


def flood(count: int, seed: int) -> None:
    """Let strangers come while two islands exchange frames; assert that only these count."""
    there = places(3)
    with islands(there[:2]) as (one, other):
        one.peer(1)
        port = int(there[0].addresses[0].rpartition(":")[2])
        strangers = IslandStrangers(there[2], port, seed)
        for number in range(count):
            strangers.come()
            if number % 20 == 0:
                here, back = len(one.arrived), len(other.arrived)
                other.peer(0).send_arrays(FRAME, [np.arange(1000)])
                one.peer(1).send_arrays(FRAME, [np.arange(1000)])
                until(lambda here=here: len(one.arrived) > here)
                until(lambda back=back: len(other.arrived) > back)
        with islands(there[2:]) as (third,):  # strangers are still there
            third.peer(0)
            third.peer(1)
            one.peer(2)
            until(lambda: len(one.only("joined")) == 2)
        strangers.leave()
        assert strangers.let_in == 0
        assert [index for index, _ in one.only("joined")] == [1, 2]
        for each in (one, other):
            until(lambda each=each: each.only("lost"))
            assert [index for index, _ in each.only("lost")] == [2]


@pytest.mark.promise("islands.strangers")
def test_a_flood_of_strangers_changes_nothing(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    flood(200, seed=0)
    assert not logged(caplog)
    assert capfd.readouterr() == ("", "")


@pytest.mark.exhaustive
def test_a_long_flood_of_strangers_changes_nothing() -> None:
    flood(10_000, seed=1)

"""The network of islands: who joins, what arrives, and how soon a loss is noticed."""

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from support.island_networks import SECRET, Island, RawIsland, islands, places
from support.island_strangers import IslandStrangers
from support.waiting import until, within

from replicax.cluster.secret import Secret
from replicax.errors import ClusterError, ConfigError
from replicax.islands import entrance, network
from replicax.islands.entrance import MORE_STRANGERS, connect
from replicax.islands.frames import encode, pack
from replicax.islands.handshake import proof
from replicax.islands.messages import HANDSHAKE, Beat, Challenge, Frame, Have, Hello, Out, Proof
from replicax.islands.place import IslandPlace

FRAME = Frame(1, 2, "a topic", [(0, 1)], "null")


@pytest.fixture
def raw() -> Iterator[tuple[Island, RawIsland]]:
    """The first of two islands, and a raw one as the other."""
    first, second = places(2)
    other = RawIsland(second)
    with islands([first]) as (island,):
        yield island, other
        other.close()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_three_islands_join_whatever_the_order(order: tuple[int, ...]) -> None:
    there = places(3)
    with islands([there[index] for index in order]) as started:
        until(lambda: all(len(each.only("joined")) == 2 for each in started))
        starts = {each.place.index: each.network.start for each in started}
        assert len(set(starts.values())) == 3
        for each in started:
            others = {index: start for index, start in starts.items() if index != each.place.index}
            assert dict(each.only("joined")) == others
            assert not each.network.troubles
            assert sorted([*each.network.peers, each.place.index]) == [0, 1, 2]
            for peer in each.network.peers.values():
                assert (peer.host, peer.pid) == (socket.gethostname(), os.getpid())
    assert not started[-1].only("lost")  # it was closed first


def test_messages_and_arrays_arrive_in_order_and_intact() -> None:
    chance = np.random.default_rng(0)
    sent = [chance.integers(0, 255, size, np.uint8) for size in (0, 1, 5_000, 600_000, 7)]
    with islands(places(3)) as started:
        for one, other in itertools.permutations(started, 2):
            peer = one.peer(other.place.index)
            for number, array in enumerate(sent):
                peer.send(Have(1, number))
                header = msgspec.structs.replace(FRAME, exchange=number)
                peer.send_arrays(header, [array, array[::2]])
        for each in started:
            until(lambda each=each: len(each.arrived) == 2 * len(sent))
            until(lambda each=each: len(each.only("heard")) == 2 * len(sent))
            for index in each.network.peers:
                messages = [m for i, m in each.only("heard") if i == index]
                assert messages == [Have(1, number) for number in range(len(sent))]
                frames = [(h.exchange, a) for i, h, a in each.arrived if i == index]
                assert [number for number, _ in frames] == list(range(len(sent)))
                for (_, arrays), array in zip(frames, sent, strict=True):
                    assert np.array_equal(arrays[0], array)
                    assert np.array_equal(arrays[1], array[::2])
            assert all(name.startswith("replicax-island") for name in each.threads)


def test_the_bytes_of_frames_are_counted() -> None:
    array = np.arange(1000)
    with islands(places(2)) as (one, other):
        here, there = one.peer(1), other.peer(0)
        assert (here.sent_bytes, here.received_bytes) == (0, 0)
        here.send(Have(1, 2))  # on the other connection
        here.send_arrays(FRAME, [array, array])
        until(lambda: other.arrived)
        header = other.arrived[0][1]
        assert there.received_bytes == len(encode(header)) + 2 * array.nbytes
        until(lambda: here.sent_bytes == there.received_bytes)
        assert there.sent_bytes == here.received_bytes == 0


def test_the_limit_of_a_frame_can_change() -> None:
    with islands(places(2)) as (one, other):
        assert one.network.most_bytes == 1 << 20
        peer = one.peer(1)
        other.network.most_bytes = 80
        peer.send_arrays(FRAME, [np.zeros(10)])
        until(lambda: other.arrived)
        peer.send_arrays(FRAME, [np.zeros(10), np.zeros(1, bool)])
        assert "81" in until(lambda: other.only("lost"))[0][1]
        until(lambda: one.only("lost"))


def test_an_end_is_noticed_at_once() -> None:
    def attempt() -> float:
        with islands(places(2)) as (one, other):
            one.peer(1)
            other.peer(0)
            started = time.monotonic()
            other.network.close()
            until(lambda: one.only("lost"))
            assert not other.only("lost")
            return time.monotonic() - started

    within(0.05, attempt)


@pytest.mark.parametrize("purpose", [0, 1])
def test_either_connection_ends_both(purpose: int, raw: tuple[Island, RawIsland]) -> None:
    island, other = raw

    def attempt() -> float:
        lost = len(island.only("lost"))
        channels = other.join()
        peer = island.peer(1)
        started = time.monotonic()
        channels[purpose].end()
        until(lambda: len(island.only("lost")) > lost)
        taken = time.monotonic() - started
        assert until(channels[1 - purpose].has_ended)
        until(peer.over.is_set)
        return taken

    within(0.05, attempt)


def test_what_was_sent_before_a_close_arrives() -> None:
    large = np.ones(100_000)
    with islands(places(2)) as (one, other):
        one.peer(1).send_arrays(FRAME, [large])
        one.peer(1).send(Out("over"))
        one.network.close()
        until(lambda: other.only("lost"))
        assert [kind for kind, *_ in other.told] == ["joined", "heard", "lost"]
        assert np.array_equal(other.arrived[0][2][0], large)


def test_a_peer_that_is_closed_is_lost_and_joins_again() -> None:
    with islands(places(2)) as (one, other):
        before = one.peer(1)
        before.send(Out("over"))
        before.close()
        until(lambda: len(one.only("joined")) == len(other.only("joined")) == 2)
        assert [kind for kind, *_ in one.told] == ["joined", "lost", "joined"]
        assert [kind for kind, *_ in other.told] == ["joined", "heard", "lost", "joined"]
        for _ in range(2):  # dropped
            before.send(Out("over"))
            before.send_arrays(FRAME, [np.zeros(10)])
        assert one.peer(1) is not before


def test_a_new_start_joins_after_the_old_one() -> None:
    there = places(2)
    with islands(there[:1]) as (one,):
        for number in range(3):
            with islands(there[1:]) as (other,):
                until(lambda number=number: len(one.only("joined")) == number + 1)
                assert one.peer(1).start == other.network.start
    assert [kind for kind, *_ in one.told][:5] == ["joined", "lost"] * 2 + ["joined"]


def test_a_new_start_replaces_one_that_is_still_joined(raw: tuple[Island, RawIsland]) -> None:
    island, old = raw
    old.join()
    new = RawIsland(old.place, start="new")
    new.join()
    until(lambda: len(island.told) == 3)
    assert island.told == [
        ("joined", 1, "raw"),
        ("lost", 1, network.REPLACED),
        ("joined", 1, "new"),
    ]
    with pytest.raises(ValueError, match=network.REPLACED):
        old.dial("control")  # two that run at once do not replace each other for ever
    assert island.peer(1).start == "new"
    new.close()


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
    assert island.only("joined") == [(1, "raw")]
    assert not island.only("lost")


def test_silence_is_a_loss() -> None:
    first, second = places(2)
    with islands([first], patience_seconds=0.5) as (island,):
        other = RawIsland(second)
        control, _ = other.join()
        for _ in range(10):
            time.sleep(0.1)
            control.send(Beat())
        assert not island.only("lost")
        said = time.monotonic()
        ((index, reason),) = until(lambda: island.only("lost"))
        assert 0.45 < time.monotonic() - said < 5.0
        assert index == 1
        assert "silent" in reason
        other.close()


def test_beats_keep_silent_islands_joined() -> None:
    with islands(places(2), patience_seconds=0.5) as (one, other):
        one.peer(1)
        time.sleep(1.5)
        assert not one.only("lost")
        assert not other.only("lost")
        assert not one.only("heard")


def test_an_island_that_is_busy_with_a_message_loses_nobody() -> None:
    with islands(places(2), patience_seconds=0.3) as (one, other):
        one._heard = lambda peer, message: time.sleep(1.0)  # type: ignore[method-assign]
        one.network._heard = one._heard
        one.peer(1).close()
        until(lambda: len(other.only("joined")) == 2)
        other.peer(0).send(Have(1, 1))
        time.sleep(1.2)
        assert len(one.only("lost")) == 1


def test_a_process_that_was_frozen_loses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = places(2)
    with islands([first], patience_seconds=2.0) as (island,):
        other = RawIsland(second)
        control, _ = other.join()
        peer = island.peer(1)
        until(lambda: peer._heard_at < float("inf"))
        clock = time.monotonic
        monkeypatch.setattr(network.time, "monotonic", lambda: clock() + 100.0)
        time.sleep(0.5)
        assert not island.only("lost")
        control.send(Beat())
        monkeypatch.undo()
        other.close()
        until(lambda: island.only("lost"))


@pytest.mark.parametrize(
    ("purpose", "sent"),
    [
        (0, b"junk junk junk"),
        (0, struct.pack(">I", 2) + b"[]"),
        (0, struct.pack(">I", 1 << 31)),
        (0, struct.pack(">I", 100_000) + b"[" * 100_000),
        (0, encode(FRAME)),
        (1, encode(Beat())),
        (1, encode(msgspec.structs.replace(pack(FRAME, [])[0], crc=1))),
        (1, encode(msgspec.structs.replace(FRAME, arrays=[("complex64", [1])]))),
        (1, encode(msgspec.structs.replace(FRAME, arrays=[("int8", [1 << 40])]))),
        (1, encode(msgspec.structs.replace(FRAME, arrays=[("int8", [4])])) + b"abcd"),
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


def test_an_error_of_a_callback_is_shown_and_ends_only_that_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", shown.append)
    with islands(places(2)) as (one, other):
        one.peer(1)
        one.network._heard = lambda peer, message: 1 // 0
        one.peer(1).close()
        until(lambda: len(one.only("joined")) == 2)
        other.peer(0).send(Have(1, 1))
        until(lambda: len(one.only("joined")) == 3)
        assert [each.exc_type for each in shown] == [ZeroDivisionError]
        assert len(one.only("lost")) == 2


def wrong_places() -> list[IslandPlace]:
    """Return places that do not belong to `places(2)`, but for their addresses."""
    addresses = ("a:1", "a:2")
    more = (*addresses, "a:3")
    return [
        IslandPlace(1, addresses, "ours", Secret(b"another")),
        IslandPlace(1, addresses, "theirs", SECRET),
        IslandPlace(1, more, "ours", SECRET),
        IslandPlace(2, more, "ours", SECRET),
        IslandPlace(0, addresses, "ours", SECRET),
    ]


@pytest.mark.parametrize("wrong", wrong_places(), ids=["secret", "job", "count", "index", "own"])
def test_others_are_not_admitted(wrong: IslandPlace) -> None:
    first, second = places(2)
    with islands([first]) as (island,):
        addresses = (*first.addresses, "a:3")[: len(wrong.addresses)]
        stranger = RawIsland(_at(wrong, addresses))
        for _ in range(3):
            with pytest.raises((ValueError, OSError)):
                stranger.dial("control")
        stranger.close()
        assert not island.told
        with islands([second]):
            island.peer(1)


def _at(place: IslandPlace, addresses: tuple[str, ...]) -> IslandPlace:
    return IslandPlace(place.index, addresses, place.job, place.secret)


def test_an_island_with_another_secret_says_why_it_does_not_join() -> None:
    first, second = places(2)
    wrong = IslandPlace(1, second.addresses, "ours", Secret(b"another"))
    with islands([first, wrong]) as (one, other):
        until(lambda: other.network.troubles)
        assert not one.told
        assert not other.told


def test_an_island_with_another_count_learns_the_numbers() -> None:
    first, second = places(2)
    wrong = _at(second, (*second.addresses, "127.0.0.1:9"))
    with islands([first, wrong]) as (one, other):
        until(lambda: other.network.troubles)
        assert "2" in other.network.troubles[0]
        assert not one.told


def test_a_place_needs_a_secret() -> None:
    with pytest.raises(ConfigError, match="REPLICAX_SECRET"):
        places(2, secret=Secret())


def test_a_port_in_use_is_named_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    (place,) = places(1)
    monkeypatch.setattr(entrance, "_BIND_SECONDS", 0.3)
    with islands([place]), pytest.raises(ClusterError, match=place.addresses[0]):
        Island(place)


def test_a_port_that_becomes_free_is_taken() -> None:
    (place,) = places(1)
    with islands([place]) as (one,):
        closing = threading.Timer(0.3, one.network.close)
        closing.start()
        with islands([place]):
            closing.join()


def test_close_is_quick_and_may_come_twice() -> None:
    def attempt() -> float:
        with islands(places(3)) as started:
            for each in started:
                until(lambda each=each: len(each.network.peers) == 2)
            before = time.monotonic()
            for _ in range(2):
                for each in started:
                    each.network.close()
            return time.monotonic() - before

    within(0.5, attempt)


def test_a_peer_that_does_not_read_does_not_delay_a_close_for_long() -> None:
    first, second = places(2)
    other = RawIsland(second)
    with islands([first]) as (island,):
        other.join()
        island.peer(1).send_arrays(FRAME, [np.zeros(100_000_000, np.uint8)])
        time.sleep(0.1)
        started = time.monotonic()
        island.network.close()
        assert 0.5 < time.monotonic() - started < 10.0
    other.close()


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
        for byte in struct.pack(">I", 100) + b"x" * 100:
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
        strangers.leave()
        assert [index for index, _ in one.only("joined")] == [1, 2]
        assert [index for index, _ in one.only("lost")] == [2]
        assert [index for index, _ in other.only("lost")] == [2]


def test_a_flood_of_strangers_changes_nothing(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    flood(200, seed=0)
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


@pytest.mark.exhaustive
def test_a_long_flood_of_strangers_changes_nothing() -> None:
    flood(10_000, seed=1)


def test_a_proof_serves_for_one_connection_and_one_role(
    raw: tuple[Island, RawIsland],
) -> None:
    island, other = raw
    hello = Hello("ours", 1, 2, "raw", "control", "n" * 32)
    listener = connect(other.place.addresses[0], 10.0)
    listener.send(hello)
    challenge = HANDSHAKE.decode(listener.receive())
    assert isinstance(challenge, Challenge)
    secret = other.place.secret
    for wrong in (
        proof(secret, "replicax island listens", hello, challenge),
        proof(secret, "replicax island dials", hello, msgspec.structs.replace(challenge, nonce="")),
        proof(Secret(b"x"), "replicax island dials", hello, challenge),
        "",
        "ä" * 64,
    ):
        channel = connect(other.place.addresses[0], 10.0)
        channel.send(hello)
        assert isinstance(HANDSHAKE.decode(channel.receive()), Challenge)
        channel.send(Proof(wrong))
        with pytest.raises(OSError, match=r"."):
            channel.receive()
        channel.close()
    listener.send(Proof(proof(secret, "replicax island dials", hello, challenge)))
    answer = HANDSHAKE.decode(listener.receive())
    assert answer == Proof(proof(secret, "replicax island listens", hello, challenge))
    listener.close()
    assert not island.told

"""The network of islands: who joins, what arrives, and how soon a loss is noticed."""

import itertools
import os
import socket
import threading
import time

import numpy as np
import pytest
from support.island_networks import Island, RawIsland, islands, places
from support.waiting import until, within

from replicax.errors import ClusterError
from replicax.islands import island_listener
from replicax.islands.messages import Beat, Frame, Have, Out

FRAME = Frame(1, 2, [(0, 1)], "null")


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


@pytest.mark.exhaustive
def test_beats_keep_silent_islands_joined() -> None:
    with islands(places(2), patience_seconds=0.5) as (one, other):
        one.peer(1)
        time.sleep(1.5)
        assert not one.only("lost")
        assert not other.only("lost")
        assert not one.only("heard")


@pytest.mark.exhaustive
def test_an_island_that_is_busy_with_a_message_loses_nobody() -> None:
    with islands(places(2), patience_seconds=0.3) as (one, other):
        one.network._heard = lambda peer, message: time.sleep(1.0)
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
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 100.0)
        time.sleep(0.5)
        assert not island.only("lost")
        control.send(Beat())
        monkeypatch.undo()
        other.close()
        until(lambda: island.only("lost"))


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


def test_a_port_in_use_is_named_after_some_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    (place,) = places(1)
    monkeypatch.setattr(island_listener, "_BIND_SECONDS", 0.3)
    with islands([place]), pytest.raises(ClusterError, match=place.addresses[0]):
        Island(place)


def test_a_port_that_becomes_free_is_taken() -> None:
    (place,) = places(1)
    with islands([place]) as (one,):
        closing = threading.Timer(0.3, one.network.close)
        closing.start()
        with islands([place]):
            closing.join()


@pytest.mark.exhaustive
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

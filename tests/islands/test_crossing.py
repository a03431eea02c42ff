"""Islands dial each other: each pair has one pair of connections, whatever crosses."""

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.island_networks import Island, RawIsland, islands, places
from support.waiting import until

from replicax.islands import island_network
from replicax.islands.handshake import Handshakes
from replicax.islands.island_network import REPLACED
from replicax.islands.island_place import IslandPlace
from replicax.islands.messages import Frame, Greeting
from replicax.launch.process import free_port
from replicax.net.channel import Channel

FRAME = Frame(1, 2, [(0, 1)], "null")


def joined_once(started: list[Island]) -> None:
    """Assert that each of these has all others, once, and that frames arrive on both ends."""
    for each in started:
        until(lambda each=each: len(each.network.peers) == len(started) - 1)
    for each in started:
        for peer in each.network.peers.values():
            peer.send_arrays(FRAME, [np.arange(10)])
    for each in started:
        until(lambda each=each: len(each.arrived) == len(started) - 1)
        assert len(each.only("joined")) == len(started) - 1
        assert not each.only("lost")
        assert not each.network.troubles


def moved(place: IslandPlace, index: int, address: str) -> IslandPlace:
    """Return `place`, which knows another address of one island."""
    addresses = [*place.addresses]
    addresses[index] = address
    return replace(place, addresses=tuple(addresses))


@pytest.mark.parametrize(
    "trials", [10, pytest.param(300, marks=pytest.mark.exhaustive)], ids=["few", "many"]
)
def test_islands_that_start_at_once_join_once(trials: int) -> None:
    for _ in range(trials):
        there, started = places(3), []
        gate = threading.Barrier(3)

        def start(
            place: IslandPlace, started: list[Island] = started, gate: threading.Barrier = gate
        ) -> None:
            gate.wait()
            started.append(Island(place))

        threads = [threading.Thread(target=start, args=[place]) for place in there]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            joined_once(started)
        finally:
            for each in started:
                each.network.close()


@pytest.mark.parametrize("late", [0, 1], ids=["the first is late", "the second is late"])
@pytest.mark.parametrize("step", range(4))
def test_connections_that_cross_become_one_pair(
    late: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One end's dial waits at each of its steps until the other has come to the same or is done."""
    arrived, dial = [threading.Event(), threading.Event()], Handshakes.dial

    def wait(index: int, at: int) -> None:
        if at == step:
            arrived[index].set()
            if index == late:
                arrived[1 - index].wait(0.5)

    def dials(self: Any, channel: Channel, other: int, purpose: Any) -> Greeting:
        index, first = self._place.index, 2 * (purpose == "data")
        wait(index, first)
        challenge = dial(self, channel, other, purpose)
        wait(index, first + 1)
        return challenge

    monkeypatch.setattr(Handshakes, "dial", dials)
    with islands(places(2)) as started:
        joined_once(started)


@pytest.mark.parametrize("mover", [0, 1])
def test_a_start_at_another_address_reaches_those_that_know_the_old_one(mover: int) -> None:
    there = places(3)
    with islands([place for place in there if place.index != mover]) as (one, other):
        new = f"127.0.0.1:{free_port()}"
        for number in range(2):  # the second one again at an address that nobody knows
            with islands([moved(there[mover], mover, new)]) as (third,):
                for each in (one, other):
                    until(lambda each=each, n=number: len(each.only("joined")) == 2 + n)
                    assert each.peer(mover).start == third.network.start
                until(lambda third=third: len(third.network.peers) == 2)
                assert not third.only("lost")
            new = f"127.0.0.1:{free_port()}"


@pytest.mark.parametrize(("raw", "other"), [(0, 1), (1, 0)])
def test_a_start_at_another_address_replaces_the_old_one(raw: int, other: int) -> None:
    there = places(2)
    with islands([there[other]]) as (island,):
        old = RawIsland(there[raw], other)
        old.join()
        assert island.peer(raw).start == "raw"
        with islands([moved(there[raw], raw, f"127.0.0.1:{free_port()}")]) as (new,):
            until(lambda: len(island.only("joined")) == 2)
            assert island.only("lost") == [(raw, REPLACED)]
            assert island.peer(raw).start == new.network.start
            assert until(lambda new=new: new.only("joined")) == [(other, island.network.start)]
            with pytest.raises(ValueError, match=REPLACED):
                old.dial("control")
        old.close()


def test_the_first_of_a_pair_decides_which_connections_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(island_network, "HANDSHAKE_SECONDS", 0.5)
    there = places(2)
    with islands(there[1:]) as (island,):
        first = RawIsland(there[0], other=1)
        control, data = first.dial("control"), first.dial("data")
        until(control.has_ended)
        until(data.has_ended)
        assert not island.told
        first.join()
        assert until(lambda: island.only("joined")) == [(0, "raw")]
        first.close()


def test_an_island_that_waits_for_a_decision_closes_at_once() -> None:
    there = places(2)
    with islands(there[1:]) as (island,):
        first = RawIsland(there[0], other=1)
        control, data = first.dial("control"), first.dial("data")
        island.network.close()
        until(control.has_ended)
        until(data.has_ended)
        assert not island.told
        first.close()

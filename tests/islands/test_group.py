"""Islands and their group, each in a thread."""

import time
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from support.island_groups import STATE, Threads
from support.island_networks import places
from support.tiers import only
from support.waiting import until

from replicax.cluster.watchdog import Timeouts
from replicax.errors import AgreementError, IslandLeftError
from replicax.islands import founding
from replicax.islands.group import Group
from replicax.net import stall_clock


@pytest.fixture
def threads() -> Iterator[Threads]:
    found = Threads()
    yield found
    found.close()


def test_an_island_that_waits_for_others_can_be_stopped() -> None:
    asked = []
    group = Group(places(2)[0], Timeouts())
    group.stops = lambda: bool(asked.append(None)) or len(asked) > 1
    with pytest.raises(IslandLeftError, match="island 0"):
        group.enter({})
    group.finish()
    assert len(asked) == 2


def test_who_refuses_another_tells_those_that_would_wait_for_it(threads: Threads) -> None:
    first, odd, late = map(threads.start, places(3))
    until(lambda: all(len(each.network.peers) == 2 for each in (first, odd, late)))
    entering = [threads.enter(first, rate=1), threads.enter(odd, rate=2)]
    for each in entering:
        with pytest.raises(AgreementError, match="rate"):
            each.result(20.0)
    for each in (first, odd):
        each.finish()
    with pytest.raises(AgreementError, match="rate"):
        threads.enter(late, rate=1).result(5.0)


def test_nobody_is_the_first_before_it_is_agreed(threads: Threads) -> None:
    one, other = threads.found(places(2))
    threads.all_exchange([one, other])
    one.network.close()
    until(lambda: other.agreement.members == [1])
    assert other.agreement.rank == 1  # the first may live, and go on
    other.arbiter = lambda most_terminated: not most_terminated
    threads.exchange(other).result(20.0)
    assert other.agreement.rank == 0


def test_an_island_joins_when_it_may_and_receives_a_long_history(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(founding, "FOUND_SECONDS", 0.0)
    *there, place = places(3)
    members, third = threads.found(there), threads.start(place)
    joins = threads.enter(third)
    until(lambda: all(2 in each._candidates for each in members))
    members[0].admits = False  # one is enough
    for _ in range(3):
        threads.all_exchange(members, admits=True)
    assert members[0].agreement.members == [0, 1]
    members[0].admits = True
    threads.all_exchange(members, admits=True)
    assert [each.agreement.members for each in members] == [[0, 1, 2]] * 2
    assert members[0].newcomers == [2]
    history = {"records": ["a line of 40 characters, as in a record."] * 200_000}
    members[0].give(history, STATE[1])
    received = joins.result(20.0)
    assert received.run == history
    for given, array in zip(STATE[1], received.arrays, strict=True):
        np.testing.assert_array_equal(given, array, strict=True)
    assert third.taken_changes() == []
    # It would be taken in again by each vote if it were thrown out but still connected.
    assert not any(2 in each._candidates for each in members)
    threads.all_exchange([*members, third])


def test_an_island_asks_again_if_the_one_that_gives_it_the_state_dies(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(founding, "FOUND_SECONDS", 0.0)
    *there, place = places(3)
    members, third = threads.found(there), threads.start(place)
    joins, first_start = threads.enter(third), third.network.start
    until(lambda: all(2 in each._candidates for each in members))
    threads.all_exchange(members, admits=True)
    members[1].arbiter = lambda most_terminated: True
    waiting = threads.exchange(members[1])
    members[0].network.close()
    assert waiting.result(20.0) == ([], [1])  # without its patience of 60 s
    until(lambda: third.network.start != first_start)
    until(lambda: 2 in members[1]._candidates)
    threads.all_exchange(members[1:], admits=True)
    members[1].give(*STATE)
    assert joins.result(20.0).run == STATE[0]


@pytest.mark.parametrize("slow", only([False], [True, False]))
def test_a_slow_exchange_has_time(threads: Threads, slow: bool) -> None:
    one, other = threads.found(places(2), stall_seconds=0.3, stall_multiple=1.0)
    for _ in range(3):
        threads.all_exchange([one, other])
    one.arbiter = lambda most_terminated: True
    early = threads.exchange(one, slow=slow)
    time.sleep(1.5)
    assert early.done() is not slow
    if slow:
        threads.exchange(other).result(20.0)
    assert early.result(20.0) == ([], [0, 1] if slow else [0])


@pytest.mark.exhaustive
def test_an_island_that_rests_is_waited_for(threads: Threads) -> None:
    one, other = threads.found(places(2), stall_seconds=0.3, stall_multiple=1.0, silent_seconds=2.0)
    for _ in range(3):
        threads.all_exchange([one, other])
    other.network.rests = True  # as while a slow disk is waited for
    until(lambda: one.network.peers[1].rests)
    early = threads.exchange(one)
    time.sleep(1.5)
    assert not early.done()
    threads.exchange(other).result(20.0)
    assert early.result(20.0) == ([], [0, 1])
    other.network.rests = False
    until(lambda: not one.network.peers[1].rests)


def test_time_in_which_an_island_was_frozen_does_not_count(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = threads.found(places(2))
    for _ in range(3):
        threads.all_exchange([one, other])
    ahead = 0.0
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() + ahead, time=time.time, sleep=time.sleep
    )
    monkeypatch.setattr(stall_clock, "time", clock)
    early = threads.exchange(one)
    time.sleep(0.1)
    ahead = 10_000.0
    time.sleep(1.2)
    assert not early.done()
    threads.exchange(other).result(20.0)
    assert early.result(20.0) == ([], [0, 1])


@pytest.mark.exhaustive
def test_an_island_that_takes_steps_is_waited_for(threads: Threads) -> None:
    """As at the end of a round, where a slow one has many left."""
    one, other = threads.found(places(2), stall_seconds=1.0, stall_multiple=1.0, silent_seconds=2.0)
    one.arbiter = lambda most_terminated: True
    for _ in range(3):
        threads.all_exchange([one, other])
    early = threads.exchange(one)
    for _ in range(20):
        time.sleep(0.15)
        other.move()
    assert not early.done()
    threads.exchange(other).result(20.0)
    assert early.result(20.0) == ([], [0, 1])
    assert threads.exchange(one).result(20.0) == ([], [0])  # it takes none any more


def test_a_thread_that_waits_for_others_ends_when_the_island_leaves(threads: Threads) -> None:
    one, other = threads.found(places(2))
    threads.all_exchange([one, other])
    waiting = threads.exchange(one)
    until(lambda: one.agreement.missing(1) == [1])
    one.finish()
    with pytest.raises(IslandLeftError):
        waiting.result(20.0)

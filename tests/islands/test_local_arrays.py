"""Arrays of each island's own, which all islands receive: by rank, to the bit, whoever dies."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.island_groups import STATE, Threads
from support.island_networks import places
from support.waiting import until

from replicax.cluster.cluster_job import Lone
from replicax.cluster.place import find_place
from replicax.errors import AgreementError, DivergedError, IslandLeftError
from replicax.islands import founding
from replicax.islands.group import Group
from replicax.islands.island_job import IslandJob
from replicax.islands.messages import Have

Replicated = list[list[np.ndarray]]


@pytest.fixture
def threads() -> Iterator[Threads]:
    found = Threads()
    yield found
    found.close()


def arrays(island: int) -> list[np.ndarray]:
    """Return arrays that differ between islands, and that a sum or a conversion would change."""
    return [
        np.array([-0.0, island, 1e-45], np.float32),
        np.array([[island, -3]], ml_dtypes.bfloat16),
        np.full(island, island, np.int8),  # empty on the first
    ]


def assert_from(islands: Sequence[int], found: Replicated) -> None:
    assert len(found) == len(islands)
    for island, each in zip(islands, found, strict=True):
        assert [(a.dtype, a.shape, a.tobytes()) for a in each] == [
            (a.dtype, a.shape, a.tobytes()) for a in arrays(island)
        ]


class Islands:
    """The jobs of islands, whose calls run in a thread for each."""

    def __init__(self, threads: Threads, count: int, **timeouts: float) -> None:
        self.groups = threads.found(places(count), **timeouts)
        self.jobs = [job_of(each) for each in self.groups]
        self._pool = ThreadPoolExecutor(8)
        threads.on_close(self._close)
        self.all_do(lambda job: job.everyone.gather("a vote", 0))  # now all hold the state

    def _close(self) -> None:
        for job in self.jobs:
            job.finish()
            job._background.shutdown()
        self._pool.shutdown()

    def do(self, island: int, call: Callable[[IslandJob], Any]) -> Any:
        return self._pool.submit(call, self.jobs[island])

    def share(self, *islands: int) -> list[Any]:
        return [self.do(i, lambda job: job.share(arrays(job.island))()) for i in islands]

    def all_do(self, call: Callable[[IslandJob], Any], *islands: int) -> list[Any]:
        waiting = [self.do(island, call) for island in islands or range(len(self.jobs))]
        return [each.result(20.0) for each in waiting]

    def waits_for(self, missing: int, *islands: int) -> None:
        """Wait until these islands have sent their arrays, and have those of all but one."""
        for island in islands:
            of = self.groups[island].agreement
            until(lambda of=of: of.missing(of.committed + 1) == [missing])

    def kill(self, island: int) -> None:
        self.groups[island].network.close()


def job_of(group: Group) -> IslandJob:
    return IslandJob(Lone(find_place({})), group.place, group)


def test_who_dies_before_it_sends_is_left_out(threads: Threads) -> None:
    islands = Islands(threads, 3)
    waiting = islands.share(0, 2)
    islands.waits_for(1, 0, 2)
    islands.kill(1)
    for each in waiting:
        assert_from([0, 2], each.result(20.0))  # sent once, before its death, and not twice
    assert [islands.jobs[n].span for n in (0, 2)] == [(0, 2), (1, 2)]


def test_what_some_have_of_a_lost_island_counts_nowhere(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    islands = Islands(threads, 3)
    monkeypatch.setattr(islands.groups[2].network.peers[1], "send_arrays", lambda *_: None)
    waiting, _ = islands.share(0, 1), islands.share(2)
    islands.waits_for(2, 1)
    until(lambda: islands.groups[0].agreement.missing(1) == [])
    islands.kill(2)
    for each in waiting:
        assert_from([0, 1], each.result(20.0))
    assert [islands.jobs[n].span for n in (0, 1)] == [(0, 2), (1, 2)]


def test_what_one_has_completed_counts_everywhere(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second does not hear that the third has all arrays, and the first does."""
    islands = Islands(threads, 3)
    peer = islands.groups[2].network.peers[1]
    send = peer.send
    monkeypatch.setattr(peer, "send", lambda told: None if type(told) is Have else send(told))
    waiting, _ = islands.share(0, 1), islands.share(2)
    assert_from([0, 1, 2], waiting[0].result(20.0))
    assert not waiting[1].done()
    islands.kill(2)
    assert_from([0, 1, 2], waiting[1].result(20.0))
    # Both divide the rows of the next round by three, though one had heard of the death before.
    assert [islands.jobs[n].span for n in (0, 1)] == [(0, 3), (1, 3)]
    for found in islands.all_do(lambda job: job.share(arrays(job.island))(), 0, 1):
        assert_from([0, 1], found)
    assert [islands.jobs[n].span for n in (0, 1)] == [(0, 2), (1, 2)]


def test_a_death_between_exchanges_changes_the_span_with_the_next_one(threads: Threads) -> None:
    islands = Islands(threads, 3)
    islands.all_do(lambda job: job.share(arrays(job.island))())
    islands.kill(0)
    until(lambda: [group.agreement.members for group in islands.groups[1:]] == [[1, 2]] * 2)
    assert [group.agreement.span for group in islands.groups[1:]] == [(1, 3), (2, 3)]
    islands.all_do(lambda job: job.share(arrays(job.island))(), 1, 2)
    assert [group.agreement.span for group in islands.groups[1:]] == [(0, 2), (1, 2)]


@pytest.mark.parametrize("dies", [False, True])
def test_who_joins_at_a_vote_has_a_span_at_once(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Also if another one dies before the state is given."""
    monkeypatch.setattr(founding, "FOUND_SECONDS", 0.0)
    *there, place = places(4)
    members, fourth = threads.found(there), threads.start(place)
    joins = threads.enter(fourth)
    until(lambda: all(3 in each._candidates for each in members))
    threads.all_exchange(members, admits=True)
    assert [each.agreement.span for each in members] == [(n, 4) for n in range(3)]
    if dies:
        members[1].network.close()
        until(lambda: members[0].agreement.members == [0, 2, 3])
    members[0].give(*STATE)
    assert joins.result(20.0).run == STATE[0]
    assert fourth.agreement.span == (3, 4)
    alive = [each for each in [*members, fourth] if not dies or each is not members[1]]
    jobs = [job_of(each) for each in alive]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda job: job.share(arrays(job.island))(), jobs)
    for each in found:
        assert_from([group.place.index for group in alive], each)
    assert [job.span for job in jobs] == [(n, len(jobs)) for n in range(len(jobs))]


def test_what_is_sent_in_the_background_comes_before_what_follows(threads: Threads) -> None:
    islands = Islands(threads, 3)
    late = threading.Event()

    def go(job: IslandJob) -> tuple[Replicated, list[Any], Replicated]:
        if job.island == 1:
            late.wait(20.0)
        later = job.share(arrays(job.island), later=True)
        votes = job.everyone.gather("a vote", job.island)
        second = job.share(arrays(job.island), later=True)
        first = later()
        assert_from(range(3), second())
        return first, votes, job.share(arrays(job.island))()

    waiting = [islands.do(island, go) for island in range(3)]
    time.sleep(0.2)
    assert not any(each.done() for each in waiting)
    late.set()
    for each in waiting:
        first, votes, last = each.result(20.0)
        assert_from(range(3), first)
        assert_from(range(3), last)
        assert votes == [0, 1, 2]


def test_steps_go_on_while_arrays_travel_in_the_background(threads: Threads) -> None:
    islands = Islands(threads, 2)
    later = islands.jobs[0].share(arrays(0), later=True)  # returns although the other is not there
    waiting = islands.do(0, lambda _: later())
    time.sleep(0.1)
    assert not waiting.done()
    islands.share(1)[0].result(20.0)
    assert_from([0, 1], waiting.result(20.0))


def test_an_error_in_the_background_is_raised_where_the_arrays_are_needed(
    threads: Threads,
) -> None:
    islands = Islands(threads, 3)
    later = islands.jobs[0].share(arrays(0), later=True)
    islands.kill(1)
    islands.kill(2)  # most may live on without the first
    with pytest.raises(IslandLeftError):
        later()
    with pytest.raises(IslandLeftError):
        islands.jobs[0].everyone.gather("a vote", 0)


def test_islands_at_other_places_of_the_program_are_refused(threads: Threads) -> None:
    islands = Islands(threads, 2)
    waiting = [
        *islands.share(0),
        islands.do(1, lambda job: job.everyone.gather("a vote", job.island)),
    ]
    names = "a round on island 0", "a vote on island 1"
    for each in waiting:
        with pytest.raises(AgreementError) as error:
            each.result(20.0)
        assert all(name in str(error.value) for name in names)


def test_numbers_that_are_not_finite_reach_nobody(threads: Threads) -> None:
    islands = Islands(threads, 2)
    sends = [np.ones(2, np.float32), np.array([1, np.nan], ml_dtypes.bfloat16)]
    waiting = [islands.do(n, lambda job: job.share([sends[job.island]])()) for n in (0, 1)]
    for each in waiting:
        with pytest.raises(DivergedError, match="island 1 "):
            each.result(20.0)


def test_a_dry_run_sends_nothing(threads: Threads) -> None:
    job = Islands(threads, 2).jobs[1]
    with job.dry_run():
        assert job.span == (0, 2)
        assert_from([1], job.share(arrays(1))())
        assert_from([1], job.share(arrays(1), later=True)())
    assert job.span == (1, 2)
    assert job.group is not None
    assert job.group.agreement.committed == 0

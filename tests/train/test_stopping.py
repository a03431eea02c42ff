"""What processes decide together: when to stop, and when to save."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.cluster_jobs import opened

from replicax.train import stopping as stopping_module
from replicax.train.interrupt import Interrupt
from replicax.train.stopping import Stopping


class Clock:
    """The time of one process."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stopping_module, "time", made)
    return made


class Link:
    """Of process 0 where the others always say the same; it notes when votes are taken."""

    def __init__(self, *others: dict[str, Any]) -> None:
        self.others, self.votes = others, 0

    def unique(self, topic: str) -> str:
        return topic

    def gather(self, _topic: str, value: Any) -> list[Any]:
        self.votes += 1
        return [value, *self.others]


QUIET = {"stop": None, "save": False, "next": 1}


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    made = Link(QUIET)
    monkeypatch.setattr(stopping_module, "current_link", lambda: made)
    return made


def test_alone_there_is_nothing_to_wait_for() -> None:
    interrupt = Interrupt()
    stopping = Stopping(interrupt)
    assert not stopping.vote()
    interrupt.wanted, interrupt.signal = True, signal.SIGTERM
    assert stopping.wanted
    assert stopping.vote()
    assert stopping.signal == signal.SIGTERM


def test_a_save_is_due_until_it_is_done(clock: Clock) -> None:
    stopping = Stopping(Interrupt(), save_every_seconds=60.0)
    clock.now += 59.0
    stopping.vote()
    assert not stopping.save_due
    clock.now += 1.0
    stopping.vote()
    assert stopping.save_due
    stopping.vote()
    assert stopping.save_due
    clock.now += 30.0
    stopping.saved()
    assert not stopping.save_due
    clock.now += 59.0
    stopping.vote()
    assert not stopping.save_due
    clock.now += 1.0
    stopping.vote()
    assert stopping.save_due


def test_without_an_interval_no_save_is_due(clock: Clock) -> None:
    stopping = Stopping(Interrupt())
    clock.now += 1e9
    stopping.vote()
    assert not stopping.save_due


def test_votes_are_taken_about_twice_a_second(clock: Clock, link: Link) -> None:
    stopping = Stopping(Interrupt())
    for _ in range(10_000):
        clock.now += 0.002
        stopping.vote()
    assert 20 / 0.5 - 2 <= link.votes <= 20 / 0.5 + 10


def test_slow_steps_vote_each_time(clock: Clock, link: Link) -> None:
    stopping = Stopping(Interrupt())
    for _ in range(20):
        clock.now += 2.0
        stopping.vote()
    assert link.votes == 20


def between_votes(clock: Clock, link: Link, stopping: Stopping, pace: float, unit: str) -> float:
    """Seconds until the next vote, where each `unit` takes `pace`."""
    votes, began = link.votes, clock.now
    while link.votes == votes:
        clock.now += pace
        stopping.vote(unit=unit)
    return clock.now - began


def test_fast_batches_of_an_evaluation_do_not_put_off_the_vote_after_slow_steps(
    clock: Clock, link: Link
) -> None:
    stopping = Stopping(Interrupt())
    for _ in range(20):
        between_votes(clock, link, stopping, 0.001, "batch")
    assert between_votes(clock, link, stopping, 10.0, "step") == pytest.approx(10.0)
    assert between_votes(clock, link, stopping, 10.0, "step") == pytest.approx(10.0)


def test_steps_that_only_seem_fast_do_not_put_off_the_vote(clock: Clock, link: Link) -> None:
    """The devices' queue takes 50 steps at once, and then each when one is done."""
    stopping, longest, last, votes = Stopping(Interrupt()), 0.0, clock.now, 0
    for step in range(500):
        clock.now += 0.0001 if step < 50 else 0.4
        stopping.vote()
        if link.votes > votes:
            longest, last, votes = max(longest, clock.now - last), clock.now, link.votes
    assert longest < 50 * 0.4
    assert clock.now - last < 1.0


def test_process_0_says_when_to_save_and_anybody_when_to_stop(clock: Clock, link: Link) -> None:
    link.others = ({**QUIET, "save": True, "next": 99},)
    stopping = Stopping(Interrupt(), save_every_seconds=60.0)
    clock.now += 30.0
    stopping.vote()
    assert not stopping.save_due
    clock.now += 30.0
    stopping.vote()
    assert stopping.save_due
    assert not stopping.wanted
    link.others = (QUIET, {**QUIET, "stop": int(signal.SIGTERM)})
    clock.now += 30.0
    assert stopping.vote()
    assert (stopping.wanted, stopping.signal) == (True, signal.SIGTERM)
    votes = link.votes
    assert stopping.vote()
    assert link.votes == votes  # decided


def test_process_0_says_when_the_next_vote_is(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = []

    class Second(Link):
        def gather(self, topic: str, value: Any) -> list[Any]:
            votes.append(stopping._calls)
            return [{**QUIET, "next": 7}, *super().gather(topic, value)]

    link = Second()
    monkeypatch.setattr(stopping_module, "current_link", lambda: link)
    stopping = Stopping(Interrupt())
    for _ in range(16):
        clock.now += 2.0
        stopping.vote()
    assert votes == [1, 8, 15]


def test_a_signal_is_a_wish_until_all_know(clock: Clock, link: Link) -> None:
    interrupt = Interrupt()
    stopping = Stopping(interrupt)
    interrupt.wanted, interrupt.signal = True, signal.SIGINT
    assert not stopping.wanted
    assert stopping.vote()


def test_processes_stop_and_save_at_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a real hub, at paces of their own."""
    own = threading.local()
    monkeypatch.setattr(stopping_module, "current_link", lambda: own.link)
    with opened(3) as job:
        processes = job.start()

        def run(number: int) -> tuple[int, list[int]]:
            own.link = processes[number].link
            interrupt = Interrupt()
            stopping = Stopping(interrupt, 0.4 if number == 0 else 1e9)
            saves, calls = [], 0
            while True:
                calls += 1
                time.sleep(0.001 * (number + 1))
                if number == 1 and calls == 400:
                    interrupt.wanted, interrupt.signal = True, int(signal.SIGTERM)
                if stopping.vote(unit="batch" if calls % 100 > 90 else "step"):
                    return calls, saves
                if stopping.save_due:
                    saves.append(calls)
                    stopping.saved()

        with ThreadPoolExecutor(3) as threads:
            ended = list(threads.map(run, range(3)))
    assert ended[0] == ended[1] == ended[2]
    calls, saves = ended[0]
    assert 400 <= calls < 1000
    assert saves

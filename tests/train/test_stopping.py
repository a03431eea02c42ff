"""Decisions of all processes: when to stop, and when to save."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.clock import Clock, clock_of
from support.cluster_jobs import opened

from replicax.core.ground.job import Alone
from replicax.train.run import stopping as stopping_module
from replicax.train.run.stopping import Interrupt, Stopping

clock = clock_of(stopping_module)


class Voting(Alone):
    """The job of process 0 when the others always agree; it counts the votes."""

    processes = 2

    def __init__(self, *others: dict[str, Any]) -> None:
        super().__init__()
        self.others, self.votes = others, 0

    def gather(self, topic: str, value: Any, **options: Any) -> list[Any]:
        self.votes += 1
        return [value, *self.others]


ASKED: dict[str, Any] = {"signal": None, "stop": None, "save": False, "evaluate": False}
QUIET = {**ASKED, "clock": False, "next": 1, "took": None}


@pytest.fixture
def job() -> Voting:
    return Voting(QUIET)


def test_the_first_save_of_a_start_comes_after_a_minute(clock: Clock) -> None:
    stopping = Stopping(Interrupt(), Alone(), save_every_seconds=600.0)
    for seconds in (60.0, 600.0):
        clock.now += seconds - 1
        stopping.vote()
        assert not stopping.save_due
        clock.now += 1
        stopping.vote()
        assert stopping.save_due
        stopping.saved()


def test_a_save_is_due_until_it_is_done(clock: Clock) -> None:
    stopping = Stopping(Interrupt(), Alone(), save_every_seconds=60.0)
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


def test_votes_are_taken_about_twice_a_second(clock: Clock, job: Voting) -> None:
    stopping = Stopping(Interrupt(), job)
    for _ in range(10_000):
        clock.now += 0.002
        stopping.vote()
    assert 20 / 0.5 - 2 <= job.votes <= 20 / 0.5 + 10


def between_votes(clock: Clock, job: Voting, stopping: Stopping, pace: float, unit: str) -> float:
    """Seconds until the next vote, where each `unit` takes `pace`."""
    votes, began = job.votes, clock.now
    while job.votes == votes:
        clock.now += pace
        stopping.vote(unit=unit)
    return clock.now - began


def test_fast_batches_of_an_evaluation_do_not_put_off_the_vote_after_slow_steps(
    clock: Clock, job: Voting
) -> None:
    stopping = Stopping(Interrupt(), job)
    for _ in range(20):
        between_votes(clock, job, stopping, 0.001, "batch")
    assert between_votes(clock, job, stopping, 10.0, "step") == pytest.approx(10.0)
    assert between_votes(clock, job, stopping, 10.0, "step") == pytest.approx(10.0)


def test_steps_that_only_seem_fast_do_not_put_off_the_vote(clock: Clock, job: Voting) -> None:
    """The devices' queue takes 50 steps at once, and then one for each that is done."""
    stopping, longest, last, votes = Stopping(Interrupt(), job), 0.0, clock.now, 0
    for step in range(500):
        clock.now += 0.0001 if step < 50 else 0.4
        stopping.vote()
        if job.votes > votes:
            longest, last, votes = max(longest, clock.now - last), clock.now, job.votes
    assert longest < 50 * 0.4
    assert clock.now - last < 1.0


def test_process_0_says_when_to_save_and_anybody_when_to_stop(clock: Clock, job: Voting) -> None:
    job.others = ({**QUIET, "clock": True, "next": 99},)
    stopping = Stopping(Interrupt(), job, save_every_seconds=60.0)
    clock.now += 30.0
    stopping.vote()
    assert not stopping.save_due
    clock.now += 30.0
    stopping.vote()
    assert stopping.save_due
    assert not stopping.interrupted
    job.others = (QUIET, {**QUIET, "signal": int(signal.SIGTERM)})
    clock.now += 30.0
    assert stopping.vote()
    assert (stopping.interrupted, stopping.signal) == (True, signal.SIGTERM)
    votes = job.votes
    assert stopping.vote()
    assert job.votes == votes  # decided


def test_anybody_may_ask_to_save_to_evaluate_and_to_stop(clock: Clock, job: Voting) -> None:
    stopping = Stopping(Interrupt(), job)
    job.others = ({**QUIET, "save": True, "evaluate": True},)
    assert not stopping.vote(now=True)
    assert stopping.save_due
    assert stopping.evaluation_due
    stopping.stop("good enough")
    assert stopping.hook_reason is None  # not before all know
    assert stopping.vote(now=True)
    assert (stopping.hook_reason, stopping.interrupted, stopping.is_ending) == (
        "good enough",
        False,
        True,
    )


def test_processes_stop_and_save_at_the_same_call() -> None:
    """With a real hub, at different paces."""
    with opened(3) as job:
        processes = job.start()

        def run(number: int) -> tuple[int, list[int]]:
            interrupt, every = Interrupt(), 0.4 if number == 0 else 1e9
            stopping = Stopping(interrupt, processes[number].job, every)
            saves, calls = [], 0
            while True:
                calls += 1
                time.sleep(0.001 * (number + 1))
                if number == 1 and calls == 400:
                    interrupt.signal = int(signal.SIGTERM)
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

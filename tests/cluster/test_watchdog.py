"""Timeouts, heartbeats, and the processes that are stuck, by a clock that the tests set."""

import re
import threading
from typing import Any

import pytest
from support.figures import assert_mentions, figures

import replicax as rx
from replicax.cluster import watchdog
from replicax.cluster.watchdog import (
    Heartbeat,
    LoopProgress,
    Member,
    StuckVerdict,
    Timeouts,
    Waiting,
    find_stuck,
    read_timeouts,
)
from replicax.core.ground import in_flight
from replicax.core.ground.in_flight import InFlight
from replicax.errors import ConfigError

TIMEOUTS = Timeouts(stall_multiple=10.0, stall_seconds=60.0, start_seconds=1800.0)
NOW = 1000.0
SILENT = 30.0


class Clock:
    def __init__(self) -> None:
        self.now = 500.0

    def monotonic(self) -> float:
        return self.now


class Result:
    """An array that the devices compute."""

    def __init__(self, done: bool = False, deleted: bool = False) -> None:
        self.done, self.deleted = done, deleted

    def is_ready(self) -> bool:
        if self.deleted:
            raise RuntimeError("Array has been deleted")
        return self.done

    def block_until_ready(self) -> None:
        assert self.done


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


@pytest.fixture
def progress(clock: Clock) -> LoopProgress:
    return LoopProgress(InFlight())


def begin(progress: LoopProgress, result: Result) -> None:
    """Give a step to the devices."""
    progress.move()
    progress.in_flight.add(result)


def step(progress: LoopProgress, clock: Clock, seconds: float) -> None:
    """One that takes so long, and a beat."""
    clock.now += seconds
    begin(progress, Result(done=True))
    progress.heartbeat(TIMEOUTS)


def test_before_the_first_step(progress: LoopProgress, clock: Clock) -> None:
    clock.now += 100.0
    assert progress.heartbeat(TIMEOUTS) == Heartbeat(0, 0, "starting", 100.0, 1800.0)


def test_begun_and_finished(progress: LoopProgress, clock: Clock) -> None:
    results = [Result() for _ in range(4)]
    for result in results:
        begin(progress, result)
    results[0].done = True
    results[1].deleted = True
    results[3].done = True  # the devices work in order: it can only be a guess
    beat = progress.heartbeat(TIMEOUTS)
    assert (beat.begun, beat.finished) == (4, 2)
    progress.in_flight.enter()
    assert progress.heartbeat(TIMEOUTS).begun == 5
    assert re.fullmatch(r"has begun 4 steps and .* 2, stepping for 0\.0 s", str(beat))


def test_the_usual_time_is_the_median(progress: LoopProgress, clock: Clock) -> None:
    step(progress, clock, 0.0)
    assert progress.heartbeat(TIMEOUTS).allowed_seconds == 1800.0  # one step tells no time
    for seconds in (8.0, 8.0, 900.0, 8.0):
        step(progress, clock, seconds)
    clock.now += 79.0
    assert progress.heartbeat(TIMEOUTS) == Heartbeat(5, 5, "stepping", 79.0, 80.0)


def test_a_loop_that_is_stuck_after_its_first_beat(progress: LoopProgress, clock: Clock) -> None:
    for _ in range(18):
        clock.now += 0.01
        begin(progress, Result(done=True))
    progress.heartbeat(TIMEOUTS)
    clock.now += 61.0
    beat = progress.heartbeat(TIMEOUTS)
    assert (beat.seconds, beat.allowed_seconds) == (61.0, 60.0)


def test_a_loop_that_runs_ahead_of_its_devices(
    progress: LoopProgress, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty steps sent at once, of 20 seconds each: nobody is stuck."""
    monkeypatch.setattr(in_flight, "STEPS_IN_FLIGHT", 50)
    results = [Result() for _ in range(50)]
    for result in results:
        clock.now += 0.001
        begin(progress, result)
    for number, result in enumerate(results):
        clock.now += 20.0
        beat = progress.heartbeat(TIMEOUTS)
        assert beat.seconds < 20.1
        assert beat.seconds < beat.allowed_seconds
        result.done = True
        assert progress.heartbeat(TIMEOUTS).finished == number + 1
    assert progress.heartbeat(TIMEOUTS).allowed_seconds == pytest.approx(200.0)
    clock.now += 201.0
    assert progress.heartbeat(TIMEOUTS).seconds == 201.0


def test_resting_and_moving(progress: LoopProgress, clock: Clock) -> None:
    step(progress, clock, 1.0)
    progress.rest()
    clock.now += 500.0
    assert progress.heartbeat(TIMEOUTS).doing == "idle"
    progress.move()
    clock.now += 0.5
    beat = progress.heartbeat(TIMEOUTS)
    assert (beat.doing, beat.seconds) == ("stepping", 0.5)


def test_the_time_of_a_frozen_process_is_excluded(progress: LoopProgress, clock: Clock) -> None:
    step(progress, clock, 1.0)
    clock.now += 105.0
    progress.exclude(100.0)
    assert progress.heartbeat(TIMEOUTS).seconds == 5.0
    progress.exclude(100.0)  # it has moved meanwhile: never into the future
    assert progress.heartbeat(TIMEOUTS).seconds == 0.0


@pytest.mark.parametrize(
    ("file", "doing"),
    [("/x/jax/_src/compiler.py", "compiling"), ("/x/jax/_src/callback.py", "in a callback")],
)
def test_the_stacks_tell_more(progress: LoopProgress, clock: Clock, file: str, doing: str) -> None:
    inside, leaving = threading.Event(), threading.Event()
    names: dict[str, object] = {"inside": inside, "leaving": leaving}
    exec(compile("def wait():\n    inside.set()\n    leaving.wait(5)", file, "exec"), names)
    thread = threading.Thread(target=names["wait"])  # type: ignore[arg-type]
    step(progress, clock, 1.0)
    step(progress, clock, 1.0)
    thread.start()
    inside.wait(5)
    clock.now += 0.9
    assert progress.heartbeat(TIMEOUTS).doing == "stepping"  # not worth a look
    clock.now += 0.2
    beat = progress.heartbeat(TIMEOUTS)
    leaving.set()
    thread.join()
    assert beat.doing == doing
    assert beat.allowed_seconds == (1800.0 if doing == "compiling" else 60.0)


def test_the_usual_step_times_a_multiple_but_never_too_short() -> None:
    timeouts = Timeouts(stall_multiple=10.0, stall_seconds=60.0, start_seconds=1800.0)
    assert timeouts.allowed(0.1) == 60.0
    assert timeouts.allowed(30.0) == 300.0
    assert timeouts.allowed(None) == 1800.0


def test_signs_of_life_come_several_times_before_silence() -> None:
    assert Timeouts().beat_seconds == 1.0
    assert Timeouts(silent_seconds=2.0).beat_seconds == 0.25


def test_from_the_environment() -> None:
    timeouts = read_timeouts(
        {
            "REPLICAX_STALL_SECONDS": "2",
            "REPLICAX_STALL_MULTIPLE": "3.5",
            "REPLICAX_START_SECONDS": "40",
            "REPLICAX_SILENT_SECONDS": "5e0",
        }
    )
    assert timeouts == Timeouts(3.5, 2.0, 40.0, 5.0)
    assert read_timeouts({}) == Timeouts() == rx.Patience()


@pytest.mark.parametrize("value", ["", "0", "-1", "soon", "nan"])
def test_a_limit_that_is_none(value: str) -> None:
    with pytest.raises(ConfigError, match=rf"REPLICAX_STALL_SECONDS={value}; .*above 0"):
        read_timeouts({"REPLICAX_STALL_SECONDS": value})


def member(
    process: int, begun: int, doing: str = "stepping", seconds: float = 0.0, **more: Any
) -> Member:
    allowed = more.pop("allowed", 60.0)
    heartbeat = Heartbeat(begun, begun - 1, doing, seconds, allowed)
    heard_at = NOW - more.pop("unheard", 0.5)
    return Member(process, "node", 100 + process, heard_at, heartbeat, **more)


def waits(
    topic: str, seconds: float, values: list[int], timeout: float = 0.0
) -> dict[str, Waiting]:
    sent = dict.fromkeys(values)
    return {topic: Waiting(NOW - seconds, sent, dict.fromkeys(values, timeout))}


def stuck_of(*members: Member, **waiting: Any) -> StuckVerdict | None:
    return find_stuck({m.process: m for m in members}, waiting.get("waiting", {}), NOW, SILENT)


def blamed(*members: Member, **waiting: Any) -> list[int]:
    verdict = stuck_of(*members, **waiting)
    assert verdict is not None
    return list(verdict.blames)


def test_all_is_well() -> None:
    assert stuck_of(member(0, 20, seconds=59.0), member(1, 18, seconds=59.0)) is None


def test_nothing_is_known_yet() -> None:
    assert stuck_of(Member(0, "a", 1, NOW), Member(1, "b", 2, NOW)) is None
    waiting = waits("the data", 5.0, [0])
    assert stuck_of(member(0, 0), Member(1, "b", 2, NOW), waiting=waiting) is None
    assert Heartbeat().allowed_seconds > 1e300


def test_who_has_begun_the_fewest_steps() -> None:
    verdict = stuck_of(
        member(0, 21, seconds=61.0), member(1, 20, seconds=61.5), member(2, 22, seconds=59.0)
    )
    assert verdict is not None
    assert figures(verdict.reason) == ["62", "60", "22", "1", "101", "20", "19", "61.5"]
    assert_mentions(verdict.reason, "no step", "at step 22, wait", "for process 1", "begun 20")
    assert (verdict.blames, verdict.stacks) == ([1], True)


def test_several_that_are_behind() -> None:
    stuck = [member(p, 20 if p in (1, 3) else 25, seconds=70.0) for p in range(4)]
    assert blamed(*stuck) == [1, 3]


def test_one_that_waits_for_another_that_is_still_in_time() -> None:
    # Process 1 has just moved, after a pause that was too long for process 0.
    assert blamed(member(0, 21, seconds=61.0), member(1, 20, seconds=1.0)) == [1]


def test_a_tie_blames_nobody() -> None:
    verdict = stuck_of(member(0, 7, seconds=61.0), member(1, 7, seconds=60.5))
    assert verdict is not None
    assert list(verdict.blames) == []
    assert figures(verdict.reason) == ["61", "60", "7"]
    assert_mentions(verdict.reason, "no step", "all processes")
    assert verdict.stacks


def test_among_equals_the_one_in_a_callback() -> None:
    stuck = member(1, 7, "in a callback", 61.0)
    assert blamed(member(0, 7, seconds=61.0), stuck, member(2, 7, seconds=61.0)) == [1]


def test_a_callback_of_one_that_is_ahead_is_not_the_cause() -> None:
    inside = member(1, 8, "in a callback", 61.0)
    assert blamed(member(0, 7, seconds=61.0), inside) == [0]


def test_one_that_rests_while_the_others_wait() -> None:
    assert blamed(member(0, 7, seconds=61.0), member(1, 6, "idle", 500.0)) == [1]


def test_all_rest() -> None:
    assert stuck_of(member(0, 7, "idle", 9e9), member(1, 6, "idle", 9e9)) is None


def test_one_that_has_ended() -> None:
    verdict = stuck_of(member(0, 7, seconds=61.0), member(1, 6, seconds=900.0, ended=True))
    assert verdict is not None
    assert list(verdict.blames) == [1]
    assert re.search(r"process 1 \(node, pid 101\), which ended\b.*step 6", verdict.reason)


def test_one_that_ends_in_the_middle_of_the_others_steps_is_named_at_once() -> None:
    verdict = stuck_of(
        member(0, 5, seconds=0.5), member(1, 4, seconds=0.4, ended=True), member(2, 5)
    )
    assert verdict is not None
    assert list(verdict.blames) == [1]
    assert re.search(r"at step 5, .* process 1 \(.*which ended\b.* 4\b", verdict.reason)
    assert stuck_of(member(0, 5, "idle"), member(1, 4, ended=True)) is None
    assert stuck_of(member(0, 5), member(1, 5, ended=True)) is None


def test_the_last_one_that_runs() -> None:
    assert stuck_of(member(0, 7, seconds=59.0), member(1, 7, ended=True, unheard=900.0)) is None


@pytest.mark.parametrize("doing", ["compiling", "starting"])
def test_whoever_compiles_has_longer_and_so_have_those_who_wait(doing: str) -> None:
    compiling = member(1, 6, doing, 300.0, allowed=1800.0)
    assert stuck_of(member(0, 7, seconds=300.0), compiling) is None
    compiling = member(1, 6, doing, 1801.0, allowed=1800.0)
    assert blamed(member(0, 7, seconds=1801.0), compiling) == [1]


def test_silence_comes_first() -> None:
    verdict = stuck_of(member(0, 7, seconds=61.0), member(1, 9, unheard=31.0))
    assert verdict is not None
    assert list(verdict.blames) == [1]
    assert figures(verdict.reason)[:4] == ["1", "101", "31", "9"]
    assert re.match(r"process 1 \(.*no heartbeat\b.*for 31 s, last\b", verdict.reason)


def test_silence_that_is_shorter_than_the_limit_is_said() -> None:
    verdict = stuck_of(member(0, 9, seconds=61.0), member(1, 7, unheard=29.0))
    assert verdict is not None
    assert re.search(r"no heartbeat\b.*for 29 s: frozen, .*network failure", verdict.reason)


def test_who_is_waited_for() -> None:
    waiting = waits("the step (1)", 61.0, [0])
    verdict = stuck_of(member(0, 0), member(1, 0), member(2, 0), waiting=waiting)
    assert verdict is not None
    assert list(verdict.blames) == [1, 2]
    assert re.match(r"the others\b.*waited 61 s for the\b.* \(1\) from ", verdict.reason)
    waiting = waits("the step (1)", 59.0, [0])
    assert stuck_of(member(0, 0), member(1, 0), waiting=waiting) is None


def test_who_is_waited_for_may_be_compiling() -> None:
    waiting = waits("the step (1)", 61.0, [0])
    assert stuck_of(member(0, 0), member(1, 0, allowed=1800.0), waiting=waiting) is None


def test_a_topic_may_take_its_time() -> None:
    waiting = waits("the save (1)", 61.0, [0], 300.0)
    assert stuck_of(member(0, 0), member(1, 0), waiting=waiting) is None
    waiting = waits("the save (1)", 301.0, [0], 300.0)
    assert blamed(member(0, 0), member(1, 0), waiting=waiting) == [1]
    waiting = waits("the save (1)", 59.0, [0], 2.0)
    assert stuck_of(member(0, 0), member(1, 0), waiting=waiting) is None  # never less than usual
    waiting = waits("the save (1)", 0.1, [0], 300.0)
    assert blamed(member(0, 0), member(1, 5, ended=True), waiting=waiting) == [1]


def test_who_has_ended_is_not_waited_for() -> None:
    waiting = waits("the step (1)", 0.1, [0])
    assert blamed(member(0, 0), member(1, 5, ended=True), waiting=waiting) == [1]
    waiting = waits("the step (1)", 0.1, [0])
    assert stuck_of(member(0, 0), member(1, 5, ended=True), member(2, 5), waiting=waiting) is None

"""Timeouts, heartbeats, and the processes that are stuck, by a clock that the tests set."""

import re
import threading
from typing import Any

import pytest
from support.clock import Clock, clock_of

from replicax.cluster import watchdog
from replicax.cluster.watchdog import (
    Heartbeat,
    LoopProgress,
    Member,
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


clock = clock_of(watchdog)


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
    assert read_timeouts({}) == Timeouts()


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


STUCK: dict[str, tuple[list[Member], dict[str, Waiting], list[int] | None, str]] = {
    "all is well": ([member(0, 20, seconds=59.0), member(1, 18, seconds=59.0)], {}, None, ""),
    "nothing is known yet": ([Member(0, "a", 1, NOW), Member(1, "b", 2, NOW)], {}, None, ""),
    "a value, and nothing is known yet": (
        *([member(0, 0), Member(1, "b", 2, NOW)], waits("the data", 5.0, [0]), None, ""),
    ),
    "who has begun the fewest steps": (
        [member(0, 21, seconds=61.0), member(1, 20, seconds=61.5), member(2, 22, seconds=59.0)],
        *(
            {},
            [1],
            r"no step for 62 s .* 60 s.* step 22, wait for .* 1 \(.*begun 20 .* 19\b.*61\.5",
        ),
    ),
    "several that are behind": (
        [member(p, 20 if p in (1, 3) else 25, seconds=70.0) for p in range(4)],
        *({}, [1, 3], ""),
    ),
    # It has just moved, after a pause that was too long for process 0.
    "one that is still in time": (
        *([member(0, 21, seconds=61.0), member(1, 20, seconds=1.0)], {}, [1], ""),
    ),
    "a tie blames nobody": (
        [member(0, 7, seconds=61.0), member(1, 7, seconds=60.5)],
        *({}, [], r"no step for 61 s .* 60 s.*all processes.* 7$"),
    ),
    "among equals the one in a callback": (
        [
            member(0, 7, seconds=61.0),
            member(1, 7, "in a callback", 61.0),
            member(2, 7, seconds=61.0),
        ],
        *({}, [1], ""),
    ),
    "a callback of one that is ahead is not the cause": (
        *([member(0, 7, seconds=61.0), member(1, 8, "in a callback", 61.0)], {}, [0], ""),
    ),
    "one that rests while the others wait": (
        *([member(0, 7, seconds=61.0), member(1, 6, "idle", 500.0)], {}, [1], ""),
    ),
    "all rest": ([member(0, 7, "idle", 9e9), member(1, 6, "idle", 9e9)], {}, None, ""),
    "one that has ended": (
        [member(0, 7, seconds=61.0), member(1, 6, seconds=900.0, ended=True)],
        *({}, [1], r"process 1 \(node, pid 101\), which ended\b.*step 6"),
    ),
    "one that ends in the middle of the others' steps": (
        [member(0, 5, seconds=0.5), member(1, 4, seconds=0.4, ended=True), member(2, 5)],
        *({}, [1], r"at step 5, .* process 1 \(.*which ended\b.* 4\b"),
    ),
    "one that ended earlier than who rests": (
        *([member(0, 5, "idle"), member(1, 4, ended=True)], {}, None, ""),
    ),
    "one that ended at the same step": ([member(0, 5), member(1, 5, ended=True)], {}, None, ""),
    "the last one that runs": (
        [member(0, 7, seconds=59.0), member(1, 7, ended=True, unheard=900.0)],
        *({}, None, ""),
    ),
    **{
        f"{seconds:.0f} s of {doing}": (
            [member(0, 7, seconds=seconds), member(1, 6, doing, seconds, allowed=1800.0)],
            *({}, blames, ""),
        )
        for doing in ("compiling", "starting")
        for seconds, blames in ((300.0, None), (1801.0, [1]))
    },
    "silence comes first": (
        [member(0, 7, seconds=61.0), member(1, 9, unheard=31.0)],
        *({}, [1], r"^process 1 \(.*101\) .*no heartbeat\b.*for 31 s, last\b.* 9\b"),
    ),
    "a silence shorter than the limit is said": (
        [member(0, 9, seconds=61.0), member(1, 7, unheard=29.0)],
        *({}, [1], r"no heartbeat\b.*for 29 s: frozen, .*network failure"),
    ),
    "who is waited for": (
        [member(0, 0), member(1, 0), member(2, 0)],
        *(
            waits("the step (1)", 61.0, [0]),
            [1, 2],
            r"^the others\b.*waited 61 s for .* \(1\) from ",
        ),
    ),
    **{
        f"{seconds} s for {topic} of {timeout:.0f} s": (
            [member(0, 0), member(1, 0, allowed=allowed)],
            *(waits(topic, seconds, [0], timeout), blames, ""),
        )
        for topic, seconds, timeout, allowed, blames in (
            ("the step", 59.0, 0.0, 60.0, None),
            ("a compilation", 61.0, 0.0, 1800.0, None),
            ("the save", 61.0, 300.0, 60.0, None),
            ("the save", 301.0, 300.0, 60.0, [1]),
            ("the save", 59.0, 2.0, 60.0, None),  # never less than usual
        )
    },
    "who has ended is not waited for": (
        *([member(0, 0), member(1, 5, ended=True)], waits("the save", 0.1, [0], 300.0), [1], ""),
    ),
    "one that may still come is waited for": (
        [member(0, 0), member(1, 5, ended=True), member(2, 5)],
        *(waits("the step (1)", 0.1, [0]), None, ""),
    ),
}


@pytest.mark.promise("faults.asleep", "faults.leaves-early")
@pytest.mark.parametrize(("members", "waiting", "blames", "says"), STUCK.values(), ids=STUCK)
def test_who_is_stuck(
    members: list[Member], waiting: dict[str, Waiting], blames: list[int] | None, says: str
) -> None:
    verdict = find_stuck({m.process: m for m in members}, waiting, NOW, SILENT)
    if blames is None:
        assert verdict is None
        return
    assert verdict is not None
    assert (list(verdict.blames), verdict.stacks) == (blames, True)
    assert re.search(says, verdict.reason), verdict.reason

"""Messages between processes, and how each learns why all stop."""

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.cluster_jobs import Job, Process, opened
from support.waiting import HANG_SECONDS, until

from replicax.cluster import hub as hub_module
from replicax.cluster import link as link_module
from replicax.cluster import watchdog
from replicax.cluster.watchdog import Heartbeat, StuckVerdict, Timeouts
from replicax.cluster.wire import Gather, Message
from replicax.errors import ConfigError


def gathered(job: Job, processes: list[Process], topic: str, values: list[Any]) -> list[Any]:
    waiting = [job.call(p.gather, topic, values[p.process]) for p in processes]
    return [each.result(timeout=HANG_SECONDS) for each in waiting]


def test_values_come_in_the_order_of_the_processes() -> None:
    with opened(3) as job:
        processes = job.start()
        values: list[Any] = [{"a": [1, None]}, "zwei", 3.5]
        assert gathered(job, processes[::-1], "t", values) == [values] * 3


def test_many_topics_at_once_and_in_any_order() -> None:
    with opened(3) as job:
        processes = job.start()
        futures = [
            (topic, job.call(p.gather, f"t{topic}", (p.process, topic)))
            for p in processes
            for topic in (range(5) if p.process % 2 else reversed(range(5)))
        ]
        for topic, future in futures:
            assert future.result(timeout=HANG_SECONDS) == [[p, topic] for p in range(3)]


def test_a_large_value() -> None:
    with opened(2) as job:
        processes = job.start()
        values = ["x" * 9_000_000, "y" * 9_000_000]
        assert gathered(job, processes, "large", values) == [values] * 2
        with pytest.raises(ConfigError, match=r"20,000,\d{3} .* 16,777,216"):
            processes[0].link.gather("too large", "x" * 20_000_000)
        assert gathered(job, processes, "next", [0, 1]) == [[0, 1]] * 2


def test_a_topic_waits_for_the_last_one() -> None:
    with opened(2) as job:
        first, second = job.start()
        waiting = job.call(first.gather, "t", 1)
        time.sleep(0.3)
        assert not waiting.done()
        second.link.gather("t", 2)
        assert waiting.result(timeout=HANG_SECONDS) == [1, 2]


def hub_topics(job: Job) -> dict[str, Any]:
    return job.hub._gathers  # type: ignore[union-attr]


def test_a_gather_that_is_cancelled_is_not_waited_for() -> None:
    """Process 0 had read one batch more than process 1 when both left the pass."""
    with opened(2) as job:
        first, second = job.start()
        assert first.link.gather("batch 7", 1, lambda: bool(hub_topics(job))) == []
        until(lambda: not hub_topics(job))
        # A process that withdraws may come back.
        assert gathered(job, [first, second], "batch 7", ["a", "b"]) == [["a", "b"]] * 2


def test_who_withdraws_takes_only_its_own_value() -> None:
    with opened(3) as job:
        first, second, third = job.start()
        waiting = job.call(second.gather, "t", "b")
        until(lambda: hub_topics(job))
        assert first.link.gather("t", "early", lambda: len(hub_topics(job)["t"].values) > 1) == []
        until(lambda: list(hub_topics(job)["t"].values) == [1])
        assert gathered(job, [first, third], "t", ["a", "", "c"]) == [["a", "b", "c"]] * 2
        assert waiting.result(timeout=HANG_SECONDS) == ["a", "b", "c"]


def test_values_that_come_too_late_are_not_kept() -> None:
    with opened(2) as job:
        first, second = job.start()
        assert first.link.gather("t", 1, lambda: True) == []
        first.wire.send(Gather("t", "1"))  # as if it had crossed the withdrawal
        second.link.gather("t", 2)
        time.sleep(0.1)
        assert first.link._gathered == {}


def test_one_that_is_waited_for_has_ended() -> None:
    with opened(3) as job:
        processes = job.start()
        for p in processes[:2]:
            job.call(p.gather, "t", 0)
        processes[2].link.leave()
        for process in processes[:2]:
            verdict = process.stopped.result(timeout=HANG_SECONDS)
            assert list(verdict.blames) == [2]
            assert re.search(
                r"waited \d+ s\b.*\bt from .* 2 \(.*ended after\b.*step 0", verdict.reason
            )


def test_one_that_ends_says_how_far_it_came() -> None:
    with opened(2) as job:
        first, second = job.start()
        for process, steps in ((first, 5), (second, 4)):
            process.job.in_flight.begun = steps
        second.link.leave()
        first.job.move()
        verdict = first.stopped.result(timeout=HANG_SECONDS)
        assert list(verdict.blames) == [1]
        assert re.search(r"at step 5, .* process 1 .* 4\b", verdict.reason)


def allow(processes: list[Process], seconds: float) -> None:
    """No process takes longer, since each reports about itself."""
    for process in processes:
        process.wire.send(Heartbeat(5, 5, "stepping", 0.0, seconds))


@pytest.mark.parametrize(("timeout", "stops"), [(None, True), (0.1, True), (3.0, False)])
def test_a_topic_has_a_timeout_of_its_own(timeout: float | None, stops: bool) -> None:
    with opened(3, silent_seconds=60.0) as job:  # a beat in 1 s, after the first
        first, second, third = job.start()
        until(lambda: job.hub._members[1].heartbeat.begun == 0)  # type: ignore[union-attr]
        time.sleep(0.1)
        allow([first, second, third], 0.3)
        waiting = job.call(first.link.gather, "the save", 1, job_over(first), timeout)
        job.call(third.gather, "the save", 3)  # which has said nothing of how long
        if stops:
            # Repeated, since each process sends other reports meanwhile.
            until(lambda: allow([first, second, third], 0.3) or first.stopped.done())
            assert list(first.stopped.result().blames) == [1]
        else:
            time.sleep(0.7)
            assert not first.stopped.done()
            second.link.gather("the save", 2)
            assert waiting.result(timeout=HANG_SECONDS) == [1, 2, 3]


def job_over(process: Process) -> Any:
    return process._over.is_set


def test_the_timeout_of_one_who_withdraws_goes_with_it() -> None:
    with opened(3) as job:
        first, second, _ = job.start()
        job.call(second.gather, "t", 2)
        until(lambda: hub_topics(job))
        came = lambda: len(hub_topics(job)["t"].values) == 2  # noqa: E731
        assert first.link.gather("t", 1, came, 900.0) == []
        until(lambda: list(hub_topics(job)["t"].values) == [1])
        assert list(hub_topics(job)["t"].timeout_seconds.values()) == [0.0]


def test_one_process_has_all_stop() -> None:
    with opened(3) as job:
        processes = job.start()
        own = job.call(processes[1].link.stop_all, "SIGTERM before the first step", 75)
        expected = StuckVerdict("SIGTERM before the first step", [], stacks=False, code=75)
        for process in processes:  # the one that asks for it too
            assert process.stopped.result(timeout=HANG_SECONDS) == expected
        assert own.result(timeout=HANG_SECONDS) == expected
        # Later messages change nothing.
        assert processes[2].link.stop_all("later", 3) == expected


def test_a_failure_that_came_before_stays_one() -> None:
    with opened(2) as job:
        first, second = job.start()
        second.link.fail("ValueError: bad value", collateral=False)
        verdict = first.link.stop_all("SIGTERM before the first step", 75)
        assert verdict is not None
        assert (verdict.code, list(verdict.blames)) == (1, [1])


def test_nobody_answers_who_would_stop_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_ACKNOWLEDGE_SECONDS", 0.3)
    with opened(2) as job:
        _, second = job.start()
        with job.hub_asleep():
            assert second.link.stop_all("SIGTERM", 75) is None


def test_a_failure_is_told_to_all() -> None:
    with opened(3) as job:
        processes = job.start()
        verdict = processes[1].link.fail("ValueError: bad value", collateral=False)
        assert verdict is not None
        assert list(verdict.blames) == [1]
        for process in (processes[0], processes[2]):
            assert process.stopped.result(timeout=HANG_SECONDS).reason == (
                f"{processes[0].go.names[1]} failed: ValueError: bad value"
            )
        assert not processes[1].stopped.done()  # it ends by itself


def test_a_victim_does_not_take_the_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_COLLATERAL_SECONDS", HANG_SECONDS)
    monkeypatch.setattr(link_module, "_ACKNOWLEDGE_SECONDS", HANG_SECONDS)
    with opened(3) as job:
        processes = job.start()
        failing = job.call(fail_as_victim, processes[0])
        until(lambda: job.hub._suspecting)  # type: ignore[union-attr]
        processes[1].link.close()  # as a kill -9 does
        verdict = failing.result(timeout=HANG_SECONDS)
        assert list(verdict.blames) == [1]
        assert list(processes[2].stopped.result(timeout=HANG_SECONDS).blames) == [1]


def fail_as_victim(process: Process) -> Any:
    return process.link.fail("JaxRuntimeError: reset by peer", collateral=True)


def test_what_looks_like_a_victim_may_be_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it meanwhile, but that must not be the reason given."""
    monkeypatch.setattr(link_module, "_ACKNOWLEDGE_SECONDS", HANG_SECONDS)
    with opened(2) as job:
        first, second = job.start()
        job.call(first.gather, "t", 0)
        until(lambda: hub_topics(job))
        started = time.monotonic()
        verdict = fail_as_victim(second)
        assert time.monotonic() - started > 0.9
        assert verdict is not None
        assert "failed: JaxRuntimeError: reset by" in verdict.reason
        assert first.reason() == verdict.reason


def test_process_0_vanishes() -> None:
    with opened(3) as job:
        processes = job.start()
        assert job.hub is not None
        job.hub.close()
        for process in processes[1:]:
            verdict = process.stopped.result(timeout=HANG_SECONDS)
            assert list(verdict.blames) == [0]
            assert verdict.reason.startswith(f"{processes[0].go.names[0]} disconnected")
            assert "killed or" in verdict.reason
        assert processes[1].link.fail("late", collateral=True) is not None


def test_process_0_leaves_after_all_are_done() -> None:
    with opened(2) as job:
        processes = job.start()
        for process in processes:
            process.link.leave()
        assert job.hub is not None
        job.hub.close()
        time.sleep(0.2)
        assert not any(process.stopped.done() for process in processes)


def test_a_process_falls_silent() -> None:
    with opened(3, silent_seconds=2.0) as job:
        processes = job.start()
        awake = freeze(processes[2])
        for process in processes[:2]:
            verdict = process.stopped.result(timeout=HANG_SECONDS)
            assert list(verdict.blames) == [2]
            assert re.search(r"no heartbeat\b.*for 2 s, last at\b.*step 0: frozen", verdict.reason)
        awake.set()


def freeze(process: Process) -> threading.Event:
    """Its link's thread sleeps until the event is set, as in a stopped process."""
    awake = threading.Event()

    def sleep(_timeout_seconds: float) -> Iterator[Message]:
        awake.wait(HANG_SECONDS)
        return iter([])

    process.wire.receive = sleep  # type: ignore[method-assign, assignment]
    return awake


def test_process_0_falls_silent() -> None:
    with opened(2, silent_seconds=2.0) as job:
        _, second = job.start()
        with job.hub_asleep():
            verdict = second.stopped.result(timeout=HANG_SECONDS)
        assert list(verdict.blames) == [0]
        assert "process 0" in verdict.reason
        assert re.search(r"no heartbeat\b.*for 2 s: frozen, .*network failure", verdict.reason)
        assert verdict.stacks


def test_who_was_frozen_itself_alarms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clocks jump, as after Ctrl-Z and fg."""
    timeouts = Timeouts(silent_seconds=5.0, stall_seconds=5.0, start_seconds=5.0)
    offset = [0.0]
    monotonic = time.monotonic

    class Clock:
        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic() -> float:
            return monotonic() + offset[0]

    for module in (link_module, hub_module, watchdog):
        monkeypatch.setattr(module, "time", Clock)
    with opened(2) as job:
        job.timeouts = timeouts
        processes = job.start()
        job.call(processes[0].gather, "t", 0)
        until(lambda: hub_topics(job))
        processes[0].job.move()
        time.sleep(0.3)
        offset[0] += 100.0
        jumped = Clock.monotonic()
        members = job.hub._members.values()  # type: ignore[union-attr]
        until(lambda: all(member.heard_at > jumped for member in members))
        time.sleep(0.5)
        assert not any(process.stopped.done() for process in processes)


def test_who_is_stuck_is_found_out() -> None:
    """From heartbeats to verdict, across threads."""
    beats = {0: Heartbeat(12, 11, "stepping", 7.0, 6.0), 1: Heartbeat(11, 11, "stepping", 7.5, 6.0)}
    with opened(2) as job:
        processes = job.start()
        for process, beat in beats.items():
            processes[process].wire.send(beat)
        for each in processes:
            verdict = each.stopped.result(timeout=HANG_SECONDS)
            assert list(verdict.blames) == [1]
            assert re.search(r"the others, .* step 12, wait for .* 1 \(", verdict.reason)

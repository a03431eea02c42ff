"""Messages between processes, and how each learns why all stop."""

import re
import time
from typing import Any

import pytest
from support.cluster_jobs import Job, Process, opened
from support.waiting import HANG_SECONDS, until

from replicax.cluster import link as link_module
from replicax.cluster import watchdog
from replicax.cluster.watchdog import Heartbeat, Timeouts
from replicax.cluster.wire import Gather
from replicax.errors import ConfigError
from replicax.net import stall_clock


def gathered(job: Job, processes: list[Process], topic: str, values: list[Any]) -> list[Any]:
    waiting = [job.call(p.gather, topic, values[p.process]) for p in processes]
    return [each.result(timeout=HANG_SECONDS) for each in waiting]


def test_a_large_value() -> None:
    with opened(2) as job:
        processes = job.start()
        values = ["x" * 9_000_000, "y" * 9_000_000]
        assert gathered(job, processes, "large", values) == [values] * 2
        with pytest.raises(ConfigError, match=r"20,000,\d{3} .* 16,777,216"):
            processes[0].link.gather("too large", "x" * 20_000_000)
        assert gathered(job, processes, "next", [0, 1]) == [[0, 1]] * 2


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


def test_values_that_come_too_late_are_not_kept() -> None:
    with opened(2) as job:
        first, second = job.start()
        assert first.link.gather("t", 1, lambda: True) == []
        first.wire.send(Gather("t", "1"))  # as if it had crossed the withdrawal
        second.link.gather("t", 2)
        time.sleep(0.1)
        assert first.link._gathered == {}


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


@pytest.mark.promise("faults.exception")
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


@pytest.mark.promise("faults.frozen")
def test_process_0_falls_silent() -> None:
    with opened(2, silent_seconds=2.0) as job:
        first, second = job.start()
        with job.hub_asleep():
            verdict = second.stopped.result(timeout=HANG_SECONDS)
        assert first.stopped.result(timeout=HANG_SECONDS) == verdict  # it is told once it wakes up
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

    for module in (stall_clock, link_module, watchdog):
        monkeypatch.setattr(module, "time", Clock)
    with opened(2) as job:
        job.timeouts = timeouts
        processes = job.start()
        job.call(processes[0].gather, "t", 0)
        until(lambda: hub_topics(job))
        processes[0].job.move()
        time.sleep(0.3)
        offset[0] += 100.0
        until(lambda: job.hub._clock.frozen_seconds > 90.0)  # type: ignore[union-attr]
        time.sleep(0.5)
        assert not any(process.stopped.done() for process in processes)


@pytest.mark.promise("faults.asleep")
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

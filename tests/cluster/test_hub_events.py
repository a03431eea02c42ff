"""The hub of a job, whatever happens to its processes in whatever order, by a clock that is set."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arriving import drawn, harmed
from support.figures import assert_mentions
from support.quiet_hub import Connection, QuietHub, starts

from replicax.cluster.job_listener import HELLO_SECONDS
from replicax.cluster.watchdog import Heartbeat, StuckVerdict, Timeouts
from replicax.cluster.wire import (
    LONGEST_HELLO_BYTES,
    Bye,
    Failed,
    Gather,
    Gathered,
    Hello,
    Message,
    Withdraw,
)
from replicax.net.message import encode
from replicax.net.proof import Refusal
from replicax.net.secret import Secret

SILENT, STALL, JOIN = 30.0, 60.0, 100.0
TIMEOUTS = Timeouts(silent_seconds=SILENT, stall_seconds=STALL, start_seconds=STALL)
SECRET = Secret(b"a secret that nobody guesses")
SAID = drawn(Message).map(encode)
HELLO = Hello("ours", 1, 3, "h", 1, {"jax": "0"}, nonce="n")
STRANGE = SAID | harmed(SAID | st.just(encode(HELLO))) | st.binary(max_size=60)


@given(st.lists(st.tuples(STRANGE, st.integers(0, 2)), max_size=6), st.booleans())
def test_strangers_learn_nothing_and_change_nothing(
    said: list[tuple[bytes, int]], started: bool
) -> None:
    with QuietHub(3, TIMEOUTS, JOIN, SECRET) as quiet:
        processes = [quiet.join(process, 3) for process in range(3)] if started else []
        strangers = [quiet.connect() for _ in range(3)]
        for data, number in said:
            strangers[number].say(data)
        quiet.connect().say(b"x" * LONGEST_HELLO_BYTES)
        quiet.wait(HELLO_SECONDS + 1.0)
        for stranger in strangers:
            assert stranger.closed
            assert {type(each) for each in stranger.told} <= {Refusal}
            assert all("another job" in str(each) for each in stranger.told)
            assert "ours" not in str(stranger.told)
            assert "host" not in str(stranger.told)
        processes = processes or [quiet.join(process, 3) for process in range(3)]
        assert len(starts(processes)) == 3
        for process in processes:
            process.say(Gather("still there", "1"))
        assert all(each.told[1:] == [Gathered("still there", ["1"] * 3)] for each in processes)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"job": "theirs"}, ["another job", "REPLICAX_COORDINATOR"]),
        ({"key": Secret(b"guess")}, ["another job", "REPLICAX_SECRET", "differs"]),
        ({"key": Secret()}, ["another job", "REPLICAX_SECRET", "differs"]),
        ({"process": 0}, ["process 0 (host 0, pid 100)", "already"]),
        ({"process": 3}, ["from 0 to 2", "3"]),
        ({"process": -1}, ["from 0 to 2", "-1"]),
        ({"processes": 4}, ["3 processes", "4"]),
        ({"asks": True}, ["process 0 of this job, of 3 processes"]),
    ],
)
@pytest.mark.parametrize("started", [False, True])
def test_who_does_not_belong_to_the_job_learns_why(
    more: dict[str, Any], words: list[str], started: bool
) -> None:
    with QuietHub(3, TIMEOUTS, JOIN, SECRET) as quiet:
        for process in range(3 if started else 1):
            quiet.join(process, 3)
        refused = quiet.join(1, 3, **more)
        (told,) = refused.told
        assert isinstance(told, Refusal)
        assert [word for word in words if word not in told.reason] == []
        assert "ours" not in told.reason
        assert refused.closed
        assert len(quiet.hub._members) == (3 if started else 1)


def test_what_a_process_said_serves_for_no_other_connection() -> None:
    """And a text that is no UTF-8 does not change its proof."""
    with QuietHub(2, TIMEOUTS, JOIN, SECRET) as quiet:
        joined = quiet.join(1, 2, host="n\udce4me")
        assert not joined.told
        assert [*quiet.hub._members] == [1]
        joined.close()
        recorded = quiet.connect()
        recorded.say(bytes(joined.said))
        (told,) = recorded.told
        assert isinstance(told, Refusal)
        assert not quiet.hub._members


COMES = st.tuples(st.sampled_from(["join", "close", "junk", "wait"]), st.integers(0, 2))


@given(st.lists(COMES, max_size=25))
def test_a_job_starts_once_when_all_have_joined_in_any_order(events: list[tuple[str, int]]) -> None:
    with QuietHub(3, TIMEOUTS, JOIN) as quiet:
        joined: dict[int, Connection] = {}
        for kind, process in [*events, *[("join", process) for process in range(3)]]:
            if len(joined) == 3:
                break
            if kind == "wait":
                quiet.wait(1.0)
            elif kind == "join":
                come = quiet.join(process, 3)
                assert come.closed is (process in joined)
                joined.setdefault(process, come)
            elif process in joined:  # its rank is free again, whatever ends it
                one = joined.pop(process)
                one.close() if kind == "close" else one.say(b"junk " * 5)
            assert not starts([*joined.values()]) or len(joined) == 3
        names = [f"process {n} (host {n}, pid {100 + n})" for n in range(3)]
        assert [[*go.names] for go in starts([*joined.values()])] == [names] * 3
        assert not any(each.verdicts() for each in joined.values())


@pytest.mark.promise("faults.never-joins")
@given(st.sets(st.integers(0, 3), min_size=1, max_size=3), st.floats(0.0, 9.0))
def test_who_never_comes_is_named_to_all_that_came(late: set[int], waits: float) -> None:
    with QuietHub(4, TIMEOUTS, 10.0) as quiet:
        came = [quiet.join(process, 4) for process in sorted({*range(4)} - late)]
        quiet.wait(waits)
        assert not any(each.told for each in came)
        quiet.wait(10.5 - waits)
        for each in came:
            (verdict,) = each.verdicts()
            assert {*verdict.blames} == late
            assert_mentions(verdict.reason, "of 4 did not", "within 10 s")
        (told,) = quiet.join(min(late), 4).told
        assert_mentions(str(told), "of 4 did not", "within 10 s")


HAPPENS = st.one_of(
    st.tuples(st.just("beat"), st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.sampled_from(["gather", "withdraw"]), st.integers(0, 2), st.sampled_from("ab")),
    st.tuples(st.just("wait"), st.just(0), st.integers(1, 25)),
    st.tuples(st.just("freeze"), st.just(0), st.integers(100, 1000)),
)
ENDS = st.sampled_from(
    ["nothing", "close", "junk", "fail", "victim", "cause", "silence", "bye", "stop"]
)


@pytest.mark.promise("faults.killed", "faults.frozen")
@settings(max_examples=100)
@given(st.lists(HAPPENS, max_size=25), ENDS, st.integers(0, 2))
def test_values_reach_all_and_one_reason_stops_all(
    events: list[tuple[str, int, Any]], end: str, who: int
) -> None:
    with QuietHub(3, TIMEOUTS, JOIN) as quiet:
        all_three = [quiet.join(process, 3) for process in range(3)]
        waiting: dict[str, dict[int, str]] = {"a": {}, "b": {}}
        expected: list[Message] = []

        def beat() -> None:
            for process in all_three:
                process.say(Heartbeat(0, 0, "idle"))

        for number, (kind, process, what) in enumerate(events):
            match kind:
                case "beat":
                    all_three[process].say(Heartbeat(what, what, "stepping", 0.0, STALL))
                case "gather":
                    waiting[what][process] = str(number)
                    all_three[process].say(Gather(what, str(number), 1e9))
                    if len(waiting[what]) == 3:
                        values = [waiting[what][each] for each in range(3)]
                        expected.append(Gathered(what, values))
                        waiting[what] = {}
                case "withdraw":
                    waiting[what].pop(process, None)
                    all_three[process].say(Withdraw(what))
                case "freeze":  # it cannot tell whether others were
                    quiet.wait(what, frozen=True)
                    beat()
                case _:
                    quiet.wait(float(what))
                    beat()
        for process in all_three:
            assert process.told[1:] == expected
        assert {topic for topic, held in waiting.items() if held} == {*quiet.hub._gathers}
        for held in quiet.hub._gathers.values():  # of who withdraws nothing is left
            assert held.timeout_seconds == dict.fromkeys(held.values, 1e9)
        for topic in "ab":  # nobody waits for who leaves
            for process in all_three:
                process.say(Withdraw(topic))
        one, others = all_three[who], [each for each in all_three if each is not all_three[who]]
        stop = StuckVerdict("SIGTERM", [], code=75)
        match end:
            case "close":
                one.close()
            case "junk":
                one.say(b"junk " * 5)
            case "fail":
                one.say(Failed("ValueError: one", False))
                others[0].say(Failed("later", False))
            case "victim":  # there may be a cause, which comes a little later
                one.say(Failed("reset by peer", True))
                quiet.wait(0.5)
                assert not any(each.verdicts() for each in all_three)
                quiet.wait(1.0)
            case "cause":
                others[0].say(Failed("reset by peer", True))
                one.close()
            case "silence":
                for _ in range(3):
                    quiet.wait(SILENT / 2)
                    for each in others:
                        each.say(Heartbeat(0, 0, "idle"))
            case "bye":
                beat()
                one.say(Bye())
                one.close()
                quiet.wait(1.0)
            case "stop":
                one.say(stop)
                others[0].say(Failed("later", False))
        verdicts = [each.verdicts() for each in (others if one.closed else all_three)]
        if end in ("nothing", "bye"):
            assert not any(verdicts)
            return
        assert all(each == verdicts[0] for each in verdicts)
        (verdict,) = verdicts[0]
        if end == "stop":
            assert verdict == stop
            return
        assert [*verdict.blames] == [who]
        assert verdict.reason.startswith(f"process {who} (host {who}, pid {100 + who}) ")
        words = {"fail": "failed: ValueError: one", "victim": "failed: reset by peer"}
        words |= {"silence": "sent no heartbeat", "cause": "killed, crashed"}
        assert words.get(end, "last seen") in verdict.reason

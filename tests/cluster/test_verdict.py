"""Finding the process to blame, by a fake clock."""

import re
from typing import Any

import pytest
from support.figures import assert_mentions, figures

from replicax.cluster.pulse import Standing
from replicax.cluster.verdict import Member, Verdict, Waiting, judge

NOW = 1000.0
SILENT = 30.0


def member(
    process: int, begun: int, doing: str = "stepping", seconds: float = 0.0, **more: Any
) -> Member:
    allowed = more.pop("allowed", 60.0)
    standing = Standing(begun, begun - 1, doing, seconds, allowed)
    heard_at = NOW - more.pop("unheard", 0.5)
    return Member(process, "node", 100 + process, heard_at, standing, **more)


def waits(
    topic: str, seconds: float, values: list[int], patience: float = 0.0
) -> dict[str, Waiting]:
    given = dict.fromkeys(values)
    return {topic: Waiting(NOW - seconds, given, dict.fromkeys(values, patience))}


def judged(*members: Member, **waiting: Any) -> Verdict | None:
    return judge({m.process: m for m in members}, waiting.get("waiting", {}), NOW, SILENT)


def blamed(*members: Member, **waiting: Any) -> list[int]:
    verdict = judged(*members, **waiting)
    assert verdict is not None
    return list(verdict.blames)


def test_all_is_well() -> None:
    assert judged(member(0, 20, seconds=59.0), member(1, 18, seconds=59.0)) is None


def test_nothing_is_known_yet() -> None:
    assert judged(Member(0, "a", 1, NOW), Member(1, "b", 2, NOW)) is None
    waiting = waits("the data", 5.0, [0])
    assert judged(member(0, 0), Member(1, "b", 2, NOW), waiting=waiting) is None
    assert Standing().allowed_seconds > 1e300


def test_who_has_begun_the_fewest_steps() -> None:
    verdict = judged(
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
    verdict = judged(member(0, 7, seconds=61.0), member(1, 7, seconds=60.5))
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
    assert judged(member(0, 7, "idle", 9e9), member(1, 6, "idle", 9e9)) is None


def test_one_that_has_ended() -> None:
    verdict = judged(member(0, 7, seconds=61.0), member(1, 6, seconds=900.0, ended=True))
    assert verdict is not None
    assert list(verdict.blames) == [1]
    assert re.search(r"process 1 \(node, pid 101\), which ended\b.*step 6", verdict.reason)


def test_one_that_ends_in_the_middle_of_the_others_steps_is_named_at_once() -> None:
    verdict = judged(member(0, 5, seconds=0.5), member(1, 4, seconds=0.4, ended=True), member(2, 5))
    assert verdict is not None
    assert list(verdict.blames) == [1]
    assert re.search(r"at step 5, .* process 1 \(.*which ended\b.* 4\b", verdict.reason)
    assert judged(member(0, 5, "idle"), member(1, 4, ended=True)) is None
    assert judged(member(0, 5), member(1, 5, ended=True)) is None


def test_the_last_one_that_runs() -> None:
    assert judged(member(0, 7, seconds=59.0), member(1, 7, ended=True, unheard=900.0)) is None


@pytest.mark.parametrize("doing", ["compiling", "starting"])
def test_a_process_that_compiles_has_longer_and_so_have_those_that_wait(doing: str) -> None:
    compiling = member(1, 6, doing, 300.0, allowed=1800.0)
    assert judged(member(0, 7, seconds=300.0), compiling) is None
    compiling = member(1, 6, doing, 1801.0, allowed=1800.0)
    assert blamed(member(0, 7, seconds=1801.0), compiling) == [1]


def test_silence_comes_first() -> None:
    verdict = judged(member(0, 7, seconds=61.0), member(1, 9, unheard=31.0))
    assert verdict is not None
    assert list(verdict.blames) == [1]
    assert figures(verdict.reason)[:4] == ["1", "101", "31", "9"]
    assert re.match(r"process 1 \(.*no heartbeat\b.*for 31 s, last\b", verdict.reason)


def test_silence_that_is_shorter_than_the_limit_is_said() -> None:
    verdict = judged(member(0, 9, seconds=61.0), member(1, 7, unheard=29.0))
    assert verdict is not None
    assert re.search(r"no heartbeat\b.*for 29 s: frozen, .*network failure", verdict.reason)


def test_who_is_waited_for() -> None:
    waiting = waits("the step (1)", 61.0, [0])
    verdict = judged(member(0, 0), member(1, 0), member(2, 0), waiting=waiting)
    assert verdict is not None
    assert list(verdict.blames) == [1, 2]
    assert re.match(r"the others\b.*waited 61 s for the\b.* \(1\) from ", verdict.reason)
    waiting = waits("the step (1)", 59.0, [0])
    assert judged(member(0, 0), member(1, 0), waiting=waiting) is None


def test_who_is_waited_for_may_be_compiling() -> None:
    waiting = waits("the step (1)", 61.0, [0])
    assert judged(member(0, 0), member(1, 0, allowed=1800.0), waiting=waiting) is None


def test_a_topic_may_take_its_time() -> None:
    waiting = waits("the save (1)", 61.0, [0], 300.0)
    assert judged(member(0, 0), member(1, 0), waiting=waiting) is None
    waiting = waits("the save (1)", 301.0, [0], 300.0)
    assert blamed(member(0, 0), member(1, 0), waiting=waiting) == [1]
    waiting = waits("the save (1)", 59.0, [0], 2.0)
    assert judged(member(0, 0), member(1, 0), waiting=waiting) is None  # never less than usual
    waiting = waits("the save (1)", 0.1, [0], 300.0)
    assert blamed(member(0, 0), member(1, 5, ended=True), waiting=waiting) == [1]


def test_who_has_ended_is_not_waited_for() -> None:
    waiting = waits("the step (1)", 0.1, [0])
    assert blamed(member(0, 0), member(1, 5, ended=True), waiting=waiting) == [1]
    waiting = waits("the step (1)", 0.1, [0])
    assert judged(member(0, 0), member(1, 5, ended=True), member(2, 5), waiting=waiting) is None

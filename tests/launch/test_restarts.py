"""When a failure is worth a restart."""

import re
from pathlib import Path

import pytest

from replicax.launch.cause import Failure, Restarts

LOOP = "the same failure 3 times in a row: a restart will not help"


def failure(process: int = 0, cause: str = "E: x", step: int | None = 5, code: int = 1) -> Failure:
    return Failure(process, cause, code, step, Path("log"))


def verdicts(*failures: Failure, seconds: float = 60.0, restarts: int = 9) -> list[str | None]:
    each = Restarts(restarts)
    return [each.refused(failure, seconds) for failure in failures]


@pytest.mark.parametrize(
    "causes",
    [
        ["E: x"] * 3,
        ["E: at 0x7ffe10", "E: at 0x7ffe20", "E: at 0x1"],
        ["E: port 2001", "E: port 31000", "E: port 9"],
        ["E: job 3f2a9c1d4e5f6a7b", "E: job aaaaaaaaaaaaaaaa", "E: job 0123456789abcdef"],
    ],
)
def test_the_same_failure_three_times_in_a_row(causes: list[str]) -> None:
    assert verdicts(*(failure(cause=cause) for cause in causes)) == [None, None, LOOP]


@pytest.mark.parametrize(
    "last", [failure(process=1), failure(cause="F: x"), failure(step=6), failure(step=None)]
)
def test_another_failure_is_no_loop(last: Failure) -> None:
    assert verdicts(failure(), failure(), last) == [None, None, None]
    assert verdicts(failure(), last, failure(), failure()) == [None] * 4


def test_without_steps_only_what_fails_at_once_is_a_loop() -> None:
    unknown = failure(step=None)
    assert verdicts(unknown, unknown, unknown, seconds=60.0) == [None, None, None]
    assert verdicts(unknown, unknown, unknown, seconds=2.0) == [None, None, LOOP]


def test_restarts_are_counted() -> None:
    each = Restarts(2)
    assert each.refused(failure(step=1), 60.0) is None
    assert each.progress == "restart 1 of 2"
    assert each.refused(failure(step=2), 60.0) is None
    assert each.progress == "restart 2 of 2"
    assert re.fullmatch(r"all 2 restarts\b.*used up", str(each.refused(failure(step=3), 60.0)))


def test_a_stop_with_everything_saved_counts_and_is_no_failure() -> None:
    each = Restarts(3)
    assert [each.refused(failure(), 60.0) for _ in range(2)] == [None, None]
    assert each.refused(None, 60.0) is None
    assert each.progress == "restart 3 of 3"
    assert re.fullmatch(r"all 3 restarts\b.*used up", str(each.refused(None, 60.0)))
    assert Restarts(0).refused(None, 60.0) == ""
    again = Restarts(9)
    for _ in range(2):  # no three in a row
        assert [again.refused(failure(), 60.0) for _ in range(2)] == [None, None]
        assert again.refused(None, 60.0) is None


def test_a_wrong_flag_is_not_tried_again() -> None:
    assert "wrong flag" in str(verdicts(failure(code=2))[0])
    assert verdicts(failure(code=2), restarts=0) == [""]

"""Rows, and one table of what several processes found."""

import dataclasses
import json

import pytest

from replicax.doctor.row import (
    OK,
    PROBLEM,
    SKIPPED,
    WARNING,
    Row,
    Verdict,
    combined,
    guarded,
    parted,
    worst,
)
from replicax.errors import ConfigError

FINE = Row("limits", "1,024 files")
LOW = Row("limits", "64 files", WARNING, "raise it")


def test_the_fix_is_what_follows_the_last_colon() -> None:
    message = "A=4 with B=4; they count from 0: as in [::1]:80: lower it"
    assert parted(message) == ("A=4 with B=4; they count from 0: as in [::1]:80", "lower it")
    assert parted("no colon") == ("no colon", "")


def test_a_check_that_fails_is_a_problem_with_its_reason() -> None:
    def fails() -> list[Row]:
        raise OSError("the disk\nis gone")

    def refuses() -> list[Row]:
        raise ConfigError("A=1 is odd: make it even")

    (row,) = guarded("folder", fails)
    assert (row.check, row.found, row.verdict) == ("folder", "OSError: the disk is gone", PROBLEM)
    assert row.fix
    assert guarded("place", refuses) == [Row("place", "A=1 is odd", PROBLEM, "make it even")]
    assert guarded("limits", lambda: [FINE]) == [FINE]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [([], OK), ([SKIPPED, OK], OK), ([OK, WARNING], WARNING), ([PROBLEM, WARNING, OK], PROBLEM)],
)
def test_the_worst_verdict(verdicts: list[Verdict], expected: Verdict) -> None:
    assert worst(Row("check", "found", verdict) for verdict in verdicts) == expected


def test_what_is_well_is_said_by_process_0_alone() -> None:
    skipped = Row("place", "not known", SKIPPED)
    assert combined([[FINE], [Row("limits", "2,048 files"), skipped]]) == [FINE]


def test_what_some_processes_found_names_them() -> None:
    assert combined([[FINE], [LOW], [FINE], [LOW]]) == [
        FINE,
        dataclasses.replace(LOW, found="processes 1 and 3: 64 files"),
    ]
    assert combined([[LOW], [FINE]])[0].found == "process 0: 64 files"


def test_what_all_found_is_said_once() -> None:
    assert combined([[FINE, LOW]] * 3) == [FINE, LOW]


def test_rows_of_one_check_stay_together() -> None:
    place = Row("place", "process 0 of 2")
    found = combined([[FINE, place], [LOW, place]])
    assert [row.check for row in found] == ["limits", "limits", "place"]


def test_many_different_rows_are_counted_in_the_end() -> None:
    rows = combined([[FINE], *([Row("limits", f"{n} files", WARNING, "raise")] for n in range(20))])
    assert len(rows) < 10
    assert rows[-1].verdict == WARNING
    shown = len(rows) - 2
    assert rows[-1].found.startswith(f"and {20 - shown} more")


def test_rows_survive_json() -> None:
    again = Row(**json.loads(json.dumps(vars(LOW))))
    assert again == LOW

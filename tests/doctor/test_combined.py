"""Rows, one table of what several processes found, and the same as JSON."""

import dataclasses
import json

import pytest
from support.figures import figures

from replicax.doctor.combined import (
    STYLE,
    checks_or_error,
    combined,
    doctor_summary,
    finding_and_fix,
    worst,
)
from replicax.errors import ConfigError
from replicax.text.checks import FAIL, NOTE, PASS, SKIP, Check, Verdict, print_table

FINE = Check("limits", "", PASS, "1,024 files")
LOW = Check("limits", "", NOTE, "64 files", "raise it")


def test_the_fix_is_what_follows_the_last_colon() -> None:
    found, fix = "A=4 with B=4; they count from 0: as in [::1]:80", "lower it"
    assert finding_and_fix(f"{found}: {fix}") == (found, fix)
    assert finding_and_fix("no colon") == ("no colon", "")


def test_a_check_that_fails_is_a_problem_with_its_reason() -> None:
    text = "the disk\nis gone"

    def fails() -> list[Check]:
        raise OSError(text)

    found, fix = "A=1 is odd", "make it even"

    def refuses() -> list[Check]:
        raise ConfigError(f"{found}: {fix}")

    (row,) = checks_or_error("folder", fails)
    assert (row.subject, row.verdict) == ("folder", FAIL)
    assert row.found == f"OSError: {' '.join(text.split())}"
    assert row.cause
    assert checks_or_error("place", refuses) == [Check("place", "", FAIL, found, fix)]
    assert checks_or_error("limits", lambda: [FINE]) == [FINE]


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [([], PASS), ([SKIP, PASS], PASS), ([PASS, NOTE], NOTE), ([FAIL, NOTE, PASS], FAIL)],
)
def test_the_worst_verdict(verdicts: list[Verdict], expected: Verdict) -> None:
    assert worst(Check("check", "", verdict, "found") for verdict in verdicts) == expected


def test_what_some_processes_found_names_them() -> None:
    assert combined([[FINE], [LOW], [FINE], [LOW]]) == [
        FINE,
        dataclasses.replace(LOW, found="processes 1 and 3: 64 files"),
    ]
    assert combined([[LOW], [FINE]])[0].found == "process 0: 64 files"
    assert combined([[FINE, LOW]] * 3) == [FINE, LOW]


def test_rows_of_one_check_stay_together() -> None:
    place = Check("place", "", PASS, "process 0 of 2")
    found = combined([[FINE, place], [LOW, place]])
    assert [row.subject for row in found] == ["limits", "limits", "place"]


def test_many_different_rows_are_counted_in_the_end() -> None:
    rows = combined(
        [[FINE], *([Check("limits", "", NOTE, f"{n} files", "raise")] for n in range(20))]
    )
    assert len(rows) < 10
    assert rows[-1].verdict == NOTE
    shown = len(rows) - 2
    assert rows[-1].found.startswith(f"and {20 - shown} more")


def test_rows_survive_json() -> None:
    again = Check(**json.loads(json.dumps(vars(LOW))))
    assert again == LOW


ROWS = [
    Check("versions", "", PASS, " · ".join(f"package{n} 0.{n}.2" for n in range(9))),
    Check(
        "folder",
        "",
        NOTE,
        "/a/very/long/path" * 9,
        "use a shorter one, or one that is " + "l" * 90,
    ),
    Check("folder", "", FAIL, "it is full", "make room"),
    Check("clocks", "", SKIP, "one process"),
    Check(
        "all-reduce",
        "",
        PASS,
        "exact",
        figures={
            "sizes": [
                {
                    "size_bytes": 2**20,
                    "seconds": 0.002,
                    "algorithm_bytes_per_second": 5e8,
                    "bus_bytes_per_second": 7.5e8,
                }
            ]
        },
    ),
]


def show(columns: int) -> None:
    print_table(ROWS, doctor_summary(ROWS), style=dataclasses.replace(STYLE, width=columns))


def test_verdicts_fixes_and_speeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show(80)
    out = capsys.readouterr().out
    full = next(line for line in out.splitlines() if "it is full" in line)
    assert full.split()[-1] == "problem"
    assert full.startswith(" ")  # the check's name stands above
    assert "fix: make room" in out
    assert "1.05 MB  2 ms   0.5      0.75" in out
    assert out.splitlines()[-1] == "1 problem (folder) and 1 warning (folder)"


def test_the_summary() -> None:
    assert doctor_summary(ROWS[:1]).startswith("no problem")
    assert figures(doctor_summary(ROWS[:1])) == []
    assert (
        doctor_summary([ROWS[2], ROWS[2], Check("mesh", "", FAIL, "none")])
        == "3 problems (folder, mesh)"
    )

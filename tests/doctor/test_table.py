"""The table at 80 columns, and the same as JSON."""

import json

import pytest

from replicax.doctor.row import OK, PROBLEM, SKIPPED, WARNING, Row
from replicax.doctor.table import print_table, summary, to_json

ROWS = [
    Row("versions", " · ".join(f"package{n} 0.{n}.2" for n in range(9))),
    Row(
        "folder", "/a/very/long/path" * 9, WARNING, "use a shorter one, or one that is " + "l" * 90
    ),
    Row("folder", "it is full", PROBLEM, "make room"),
    Row("clocks", "one process", SKIPPED, "never shown"),
    Row(
        "all-reduce",
        "exact",
        OK,
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


@pytest.mark.parametrize("columns", [60, 80])
def test_lines_fit_and_nothing_is_lost(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(ROWS, columns)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    assert all(line == line.rstrip() for line in lines)
    assert "".join("".join(lines).split()).count("/a/very/long/path") >= 2
    assert sum("".join(lines).count(f"package{n} 0.{n}.2") for n in range(9)) == 9


def test_verdicts_fixes_and_speeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(ROWS, 80)
    out = capsys.readouterr().out
    full = next(line for line in out.splitlines() if "it is full" in line)
    assert full.split()[-1] == "problem"
    assert full.startswith(" ")  # the check's name stands above
    assert "fix: make room" in out
    assert "never shown" not in out
    assert "1.05 MB  2 ms   0.5      0.75" in out
    assert out.splitlines()[-1] == "1 problem (folder) and 1 warning (folder)"


def test_the_summary() -> None:
    assert summary(ROWS[:1]) == "no problem found"
    assert summary([ROWS[2], ROWS[2], Row("mesh", "none", PROBLEM)]) == "3 problems (folder, mesh)"


def test_json_has_the_same_rows() -> None:
    said = json.loads(json.dumps(to_json(ROWS, PROBLEM, {"process": 0})))
    assert (said["process"], said["verdict"]) == (0, "problem")
    assert [(row["check"], row["verdict"]) for row in said["rows"]] == [
        (row.check, row.verdict) for row in ROWS
    ]

"""The table: one line for equal results, within 80 columns."""

import sys

import pytest

from replicax.checks import PASS, Check, Style, checks_summary, table_text
from replicax.verify.stages import run_stages
from replicax.verify.verification import GrowingTable, Verification, merged_checks

PASSED = [
    Check("parity", f"jit, {part}{batch}", "pass", f"as one device, {at}", "", {"largest": at})
    for part, at in (("", 1e-7), ("4 micro-batches, ", 3e-7))
    for batch in ("full", "padded")
]
FAILED = Check("parity", "pmap, full", "fail", "loss is 4 times", "a mean of means: " + 40 * "so ")
SKIPPED = Check("traffic", "jit", "skip", "nothing to see")


def test_passes_of_one_mode_are_one_line() -> None:
    (line,) = merged_checks(PASSED)
    assert line.case == "jit (full, padded; and in 4 micro-batches)"
    assert line.found.endswith("one device, 3e-07")


def test_failures_stay_apart() -> None:
    assert merged_checks([FAILED, FAILED]) == [FAILED, FAILED]
    assert len(merged_checks([*PASSED, FAILED, *PASSED])) == 3


def test_it_fits_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    Verification([*PASSED, FAILED, SKIPPED]).print()
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "6 checks: 4 pass, 1 fail, 1 skip"
    assert any(f"cause: {FAILED.cause.split(';')[0][:15]}" in line for line in lines)
    print(Verification([*PASSED, FAILED, SKIPPED]))
    assert capsys.readouterr().out == printed


def test_summary_of_one() -> None:
    assert checks_summary([SKIPPED]) == "1 check: 1 skip"


def test_a_verification_is_one_line_and_printed_a_table() -> None:
    found = Verification([*PASSED, FAILED, SKIPPED])
    assert repr(found) == "Verification(ok=False, 6 checks: 4 pass, 1 fail, 1 skip)"
    assert repr(Verification(PASSED)) == "Verification(ok=True, 4 checks: 4 pass)"
    assert str(found).splitlines()[-1] == "6 checks: 4 pass, 1 fail, 1 skip"


def test_without_rich_a_verification_is_a_line_for_each_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    assert str(Verification([SKIPPED])).splitlines() == [
        f"skip  traffic, jit: {SKIPPED.found}",
        "1 check: 1 skip",
    ]


def test_checks_without_cases_have_their_subjects_in_a_column() -> None:
    checks = [Check("clocks", "", "fail", "3 s apart", "set them")]
    style = Style("fix", {"fail": "problem", PASS: "ok"}, lambda check: ["  size"])
    lines = table_text(checks, "1 problem", style=style).splitlines()
    assert lines[0].startswith("clocks  3 s apart")
    assert lines[0].endswith("problem")
    assert [line.strip() for line in lines[1:]] == ["fix: set them", "size", "", "1 problem"]


def test_a_growing_table_is_the_whole_table() -> None:
    checks = [*PASSED, FAILED, SKIPPED, SKIPPED]
    lines: list[str] = []
    table, before = GrowingTable(lines.append), []
    for check in checks:
        table.add(check)
        before.append(len(lines))
    table.finish()
    assert lines == str(Verification(checks)).splitlines()
    assert before[: len(PASSED)] == [0] * len(PASSED)  # still one line
    assert before[len(PASSED)] == before[-1] > 0  # a failure is printed at once


def test_stages_are_counted() -> None:
    shown: list[str] = []
    stages = [("one", lambda: PASSED[:2]), ("two", list), ("three", lambda: [FAILED])]
    assert list(run_stages(stages, shown.append)) == [*PASSED[:2], FAILED]
    assert shown == ["one · 1 of 3", "two · 2 of 3 · 2 pass", "three · 3 of 3 · 2 pass"]

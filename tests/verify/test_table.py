"""The table: one line for equal results, within 80 columns."""

import dataclasses

from replicax.text.checks import Check
from replicax.verify.verification import GrowingTable, Verification, merged_checks

PASSED = [
    Check("parity", f"jit, {part}{batch}", "pass", f"as one device, {at}", "", {"largest": at})
    for part, at in (("", 1e-7), ("4 micro-batches, ", 3e-7))
    for batch in ("full", "padded")
]
FAILED = Check("parity", "pmap, full", "fail", "loss is 4 times", "a mean of means: " + 40 * "so ")
SKIPPED = Check("traffic", "jit", "skip", "nothing to see")


def test_passes_of_one_mode_are_one_line_and_failures_stay_apart() -> None:
    (line,) = merged_checks(PASSED)
    assert line.case == "jit (full, padded; and in 4 micro-batches)"
    assert line.found.endswith("one device, 3e-07")
    alone = dataclasses.replace(PASSED[0], case="jit")
    assert [each.case for each in merged_checks([alone, PASSED[0]])] == ["jit (full)"]
    assert [each.case for each in merged_checks([alone, alone])] == ["jit"]
    assert merged_checks([FAILED, FAILED]) == [FAILED, FAILED]
    bits = [dataclasses.replace(alone, figures={"sha256": each}) for each in ("a", "b")]
    assert merged_checks(bits) == bits
    assert len(merged_checks([*PASSED, FAILED, *PASSED])) == 3


def test_a_verification_is_one_line_and_printed_a_table() -> None:
    found = Verification([*PASSED, FAILED, SKIPPED])
    assert repr(found) == "Verification(ok=False, 6 checks: 4 pass, 1 fail, 1 skip)"
    assert repr(Verification(PASSED)) == "Verification(ok=True, 4 checks: 4 pass)"
    *lines, last = str(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert last == "6 checks: 4 pass, 1 fail, 1 skip"


def test_a_growing_table_is_the_whole_table() -> None:
    checks = [*PASSED, FAILED, SKIPPED, SKIPPED]
    lines: list[str] = []
    table, before = GrowingTable(lines.append), []
    for check in checks:
        table.add(check)
        before.append(len(lines))
    table.finish(Verification(checks).summary)
    assert lines == str(Verification(checks)).splitlines()
    assert before[: len(PASSED)] == [0] * len(PASSED)  # still one line
    assert before[len(PASSED)] == before[-1] > 0  # a failure is printed at once

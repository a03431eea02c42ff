"""Check for versions of packages that are known to compute wrong numbers."""

import jax

from replicax.known_wrong.findings import KnownFinding, finding_of
from replicax.known_wrong.known_table import known_table, rows_here
from replicax.text.checks import FAIL, NOTE, PASS, Check

NUMBERS = "numbers"


def check_known_numbers() -> list[Check]:
    """Compare the versions with the table, and run the self-tests of those that it names."""
    return judge_numbers([finding_of(row) for row in rows_here(jax.default_backend())])


def judge_numbers(findings: list[KnownFinding]) -> list[Check]:
    """Return a row per finding whose self-test does not pass, or a single passing row."""
    rows = [_judged(finding) for finding in findings if finding.wrong is not False]
    if rows:
        return rows
    text = f"none of the {len(known_table())} known combinations that compute wrong ones is here"
    return [Check(NUMBERS, "", PASS, text)]


def _judged(finding: KnownFinding) -> Check:
    row = finding.row
    figures = {
        "name": row.name,
        "version": finding.version,
        "wrong": finding.wrong,
        "avoided": finding.avoided,
        "link": row.link,
    }
    if finding.avoided:
        text = f"{finding.found}; steps are compiled so that they are right; {row.fix}"
        return Check(NUMBERS, "", PASS, text, figures=figures)
    if row.answer == "list":
        text = f"{finding.found}, in few programs: {row.fix}"
        return Check(NUMBERS, "", PASS, text, figures=figures)
    verdict = FAIL if row.answer == "refuse" and finding.wrong else NOTE
    return Check(NUMBERS, "", verdict, finding.found, row.fix, figures)

"""Merge the checks of several processes into one table, and convert them to JSON."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from replicax.cluster.differences import processes_text
from replicax.errors import ReplicaxError
from replicax.text.checks import FAIL, NOTE, PASS, SKIP, Check, Style, Verdict
from replicax.text.table import aligned
from replicax.text.wording import counted, size_text

NOT_WELL = (NOTE, FAIL)
WORDS: Mapping[Verdict, str] = {PASS: "ok", NOTE: "warning", FAIL: "problem", SKIP: "skipped"}
_UNFORESEEN = "unexpected error; report it if the message does not explain it"
_MOST_OF_OTHERS = 4
"""Maximum rows of one check from other processes; many would be repetitive."""


def checks_or_error(subject: str, function: Callable[[], Sequence[Check]]) -> list[Check]:
    """Return the rows of `function`; if it raises, a row with the error."""
    try:
        return list(function())
    except Exception as error:
        return [has_failed(subject, error)]


def has_failed(subject: str, error: BaseException) -> Check:
    """Return the row of a check that raised `error`."""
    if isinstance(error, ReplicaxError):
        return Check(subject, "", FAIL, *finding_and_fix(str(error)))
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return Check(subject, "", FAIL, text, _UNFORESEEN)


def finding_and_fix(message: str) -> tuple[str, str]:
    """Split an error message at its last colon into the finding and the fix."""
    found, colon, fix = message.rpartition(": ")
    return (found, fix) if colon else (message, "")


def combined(rows_of: Sequence[Sequence[Check]]) -> list[Check]:
    """Merge the rows of all processes into one list.

    Includes all rows of process 0, and warnings and problems of others with their process numbers.
    """
    subjects = dict.fromkeys(row.subject for rows in rows_of for row in rows)
    return [row for subject in subjects for row in _of_subject(subject, rows_of)]


def _of_subject(subject: str, rows_of: Sequence[Sequence[Check]]) -> list[Check]:
    found_by: dict[tuple[str, Verdict, str], dict[int, Check]] = {}
    for process, rows in enumerate(rows_of):
        for row in rows:
            if row.subject == subject and (process == 0 or row.verdict in NOT_WELL):
                key = (row.found, row.verdict, row.cause)
                found_by.setdefault(key, {})[process] = row
    result: list[Check] = []
    left_out = 0
    for row_of in found_by.values():
        process, row = next(iter(row_of.items()))
        if row.verdict in NOT_WELL and len(row_of) < len(rows_of):
            row = dataclasses.replace(row, found=f"{processes_text(list(row_of))}: {row.found}")
        if process > 0 and len(result) > _MOST_OF_OTHERS:
            left_out += 1
        else:
            result.append(row)
    if left_out:
        more = f"and {left_out} more like these from other processes"
        result.append(Check(subject, "", worst(result), more, "see above"))
    return result


def worst(rows: Iterable[Check]) -> Verdict:
    """Return the worst verdict of the rows: a problem, a warning, or else a pass."""
    verdicts = {row.verdict for row in rows}
    return next((each for each in (FAIL, NOTE) if each in verdicts), PASS)


def doctor_summary(rows: Sequence[Check]) -> str:
    """Count the problems and warnings, and name their checks."""
    parts = []
    for verdict in (FAIL, NOTE):
        subjects = [row.subject for row in rows if row.verdict == verdict]
        if subjects:
            where = ", ".join(dict.fromkeys(subjects))
            parts.append(f"{counted(len(subjects), WORDS[verdict])} ({where})")
    return " and ".join(parts) or "no problem found"


def doctor_json(
    rows: Sequence[Check], verdict: Verdict, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a JSON object: `about` the job, the overall `verdict`, and `rows`."""
    listed = [
        {
            "check": row.subject,
            "found": row.found,
            "verdict": WORDS[row.verdict],
            "fix": row.cause,
            "figures": row.figures,
        }
        for row in rows
    ]
    return {**about, "verdict": WORDS[verdict], "rows": listed}


def _speeds(row: Check) -> list[str]:
    """Tabulate the all-reduce's speed by size, if the row has one."""
    sizes = row.figures.get("sizes", [])
    if not sizes:
        return []
    cells: list[tuple[str, ...]] = [("size", "time", "GB/s", "bus GB/s")]
    for each in sizes:
        rates = (each[f"{of}_bytes_per_second"] / 1e9 for of in ("algorithm", "bus"))
        milliseconds = f"{1e3 * each['seconds']:,.3g} ms"
        cells.append((size_text(each["size_bytes"]), milliseconds, *map("{:.3g}".format, rates)))
    return aligned(cells, left=0)


STYLE = Style(remedy="fix", words=WORDS, below=_speeds)

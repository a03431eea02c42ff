"""A row of the doctor's table, and how the rows of several processes become one table."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from replicax.cluster.differences import processes_text
from replicax.errors import ReplicaxError

Verdict = Literal["ok", "warning", "problem", "skipped"]
OK: Final[Literal["ok"]] = "ok"
WARNING: Final[Literal["warning"]] = "warning"
PROBLEM: Final[Literal["problem"]] = "problem"
SKIPPED: Final[Literal["skipped"]] = "skipped"

_UNFORESEEN = "what failed is in this message; report it where that makes no sense"
_MOST_OF_OTHERS = 4
"""Rows of one check that come from other processes; with many, they repeat each other."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one check has found."""

    check: str
    found: str
    verdict: Verdict = OK
    fix: str = ""
    """What to do where the verdict is a warning or a problem."""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The same as numbers and lists, for programs; what JSON can hold."""


def guarded(check: str, function: Callable[[], Sequence[Row]]) -> list[Row]:
    """The rows of `function`; where it fails, a row that says how."""
    try:
        return list(function())
    except Exception as error:
        return [failed(check, error)]


def failed(check: str, error: BaseException) -> Row:
    """The row of a check that ended with `error`."""
    if isinstance(error, ReplicaxError):
        found, fix = parted(str(error))
        return Row(check, found, PROBLEM, fix)
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    return Row(check, text, PROBLEM, _UNFORESEEN)


def parted(message: str) -> tuple[str, str]:
    """The facts and the fix of an error's message, which parts them with its last colon."""
    found, colon, fix = message.rpartition(": ")
    return (found, fix) if colon else (message, "")


def combined(rows_of: Sequence[Sequence[Row]]) -> list[Row]:
    """One list of what every process found by itself.

    All rows of process 0, and of the others those that are not ok, with who they are.
    """
    checks = dict.fromkeys(row.check for rows in rows_of for row in rows)
    return [row for check in checks for row in _of_check(check, rows_of)]


def worst(rows: Iterable[Row]) -> Verdict:
    """`problem` where there is one, else `warning` where there is one, else `ok`."""
    verdicts = {row.verdict for row in rows}
    return PROBLEM if PROBLEM in verdicts else WARNING if WARNING in verdicts else OK


def _of_check(check: str, rows_of: Sequence[Sequence[Row]]) -> list[Row]:
    found_by: dict[tuple[str, Verdict, str], dict[int, Row]] = {}
    for process, rows in enumerate(rows_of):
        for row in rows:
            if row.check == check and (process == 0 or row.verdict in (WARNING, PROBLEM)):
                key = (row.found, row.verdict, row.fix)
                found_by.setdefault(key, {})[process] = row
    result: list[Row] = []
    left_out = 0
    for by in found_by.values():
        process, row = next(iter(by.items()))
        everybody = len(by) == len(rows_of)
        if row.verdict in (WARNING, PROBLEM) and not everybody:
            row = dataclasses.replace(row, found=f"{processes_text(list(by))}: {row.found}")
        if process > 0 and len(result) > _MOST_OF_OTHERS:
            left_out += 1
        else:
            result.append(row)
    if left_out:
        more = f"and {left_out} more like these, of other processes"
        result.append(Row(check, more, worst(result), "see above"))
    return result

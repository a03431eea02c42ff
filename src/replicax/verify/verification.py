"""The result of a verification: one row per check."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicax.errors import ReplicaxError
from replicax.text.blocks import html_of
from replicax.text.checks import (
    FAIL,
    NOTE,
    SKIP,
    Check,
    RowPrinter,
    checks_grid,
    checks_summary,
    print_table,
    table_text,
)
from replicax.text.wording import first_line


@dataclasses.dataclass(frozen=True)
class Verification:
    """All checks of one step.

    Examples:
        >>> result = rx.verify(dp, model, batch, modes=["jit"])
        >>> print(result.ok, len(result.failed))
        True 0
    """

    checks: Sequence[Check]
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The subject and the devices it was verified on, as JSON values."""

    def __repr__(self) -> str:
        return f"Verification(ok={self.ok}, {checks_summary(self.checks)})"

    def __str__(self) -> str:
        return table_text(merged_checks(self.checks), self.summary)

    def _repr_html_(self) -> str:
        return html_of([checks_grid(merged_checks(self.checks))], self.summary)

    def print(self) -> None:
        """Print the table, in color on a terminal."""
        print_table(merged_checks(self.checks), self.summary)

    @property
    def summary(self) -> str:
        """The number of each verdict, and how to compare the modes that nobody asked for."""
        lines = [checks_summary(self.checks)]
        if others := self.about.get("other_modes"):
            modes = ", ".join(self.about["modes"])
            lines.append(f"only {modes}; --modes all (modes='all'): also {', '.join(others)}")
        return "\n".join(lines)

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> list[Check]:
        """Return the checks that failed."""
        return [check for check in self.checks if check.verdict == FAIL]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "ok": self.ok,
            "about": dict(self.about),
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


class GrowingTable:
    """The table of a verification, printed as its rows are found."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._checks: list[Check] = []
        self._print, self._write = RowPrinter(write), write

    def add(self, check: Check) -> None:
        """Print the rows so far, without the last if it may be merged with the next."""
        self._checks.append(check)
        rows = merged_checks(self._checks)
        self._print(rows if check.verdict in (FAIL, NOTE) else rows[:-1])

    def finish(self, summary: str) -> None:
        """Print the last row, and a summary."""
        self._print(merged_checks(self._checks))
        self._write("")
        self._write(summary)


def failed_on_one_device(error: Exception) -> Check:
    """Return the row for an error on one device, when there is nothing to compare with."""
    refused = isinstance(error, ReplicaxError)
    found = f"refused: {error}" if refused else first_line(error)
    return Check("parity", "one device", FAIL, found)


def merged_checks(checks: Sequence[Check]) -> list[Check]:
    """Merge adjacent checks that pass, or are skipped, for the same reason."""
    shown: list[Check] = []
    for _, group in itertools.groupby(enumerate(checks), key=lambda each: _alike(*each)):
        several = [check for _, check in group]
        shown.append(several[0] if len(several) == 1 else _one(several))
    return shown


def _alike(number: int, check: Check) -> tuple[object, ...]:
    """Return the key by which adjacent checks are merged."""
    if check.verdict in (FAIL, NOTE) or "sha256" in check.figures:
        return (number,)
    if check.subject == "parity":
        reason = check.found if check.verdict == SKIP else ""
        return check.subject, _mode(check), check.verdict, reason, "largest" in check.figures
    return check.subject, check.verdict, check.found


def _one(checks: Sequence[Check]) -> Check:
    first = checks[0]
    if first.subject != "parity":
        return dataclasses.replace(first, case=" · ".join(check.case for check in checks))
    parts = [check.case.split(", ")[1:] for check in checks]  # none if the mode has one case
    batches = dict.fromkeys(part for each in parts for part in each[-1:])
    first_parts = dict.fromkeys(part for each in parts for part in each[:1])
    split = [part for part in first_parts if part.endswith("micro-batches")]
    also = f"; and in {' and '.join(split)}" if split else ""
    case = f"{_mode(first)} ({', '.join(batches)}{also})" if batches else _mode(first)
    worst = max(checks, key=lambda check: float(check.figures.get("largest", 0)))
    return dataclasses.replace(worst, case=case)


def _mode(check: Check) -> str:
    return check.case.partition(", ")[0]

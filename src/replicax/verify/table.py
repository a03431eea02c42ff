"""Checks as a table that fits a terminal."""

import collections
import dataclasses
import io
import itertools
from collections.abc import Sequence
from typing import Any

from replicax.errors import MissingDependencyError, require
from replicax.verify.check import FAIL, NOTE, PASS, SKIP, Check

WIDTH = 80
_STYLES = {PASS: "green", NOTE: "yellow", FAIL: "bold red", SKIP: "dim"}


def print_table(checks: Sequence[Check]) -> None:
    """Print them as `table_text` has them, in colour on a terminal."""
    require("rich", "cli")
    from rich.console import Console

    terminal = Console(highlight=False)
    console = Console(highlight=False, width=min(WIDTH, terminal.width))
    print(_drawn(checks, console), flush=True)


def table_text(checks: Sequence[Check]) -> str:
    """Return subject, case, what was found and the verdict of each, and the cause below it.

    Rows of one subject and mode that pass alike are shown as one. Without rich it is a line each.
    """
    try:
        require("rich", "cli")
    except MissingDependencyError:
        lines = [f"{each.verdict}  {each.subject}, {each.case}: {each.found}" for each in checks]
        return "\n".join([*lines, summary(checks)])
    from rich.console import Console

    return _drawn(checks, Console(highlight=False, width=WIDTH, file=io.StringIO()))


def _drawn(checks: Sequence[Check], console: Any) -> str:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    drawn = Table.grid(padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    drawn.add_column(ratio=1, overflow="fold")
    drawn.add_column(no_wrap=True)
    before, told = None, ""
    for check in merged(checks):
        style = _STYLES[check.verdict]
        if check.subject != before:
            drawn.add_row(Text(check.subject, "bold"), "")
        before = check.subject
        line = Text(f"{check.case}: {check.found}", "dim" if check.verdict == SKIP else "")
        drawn.add_row(Padding(line, (0, 0, 0, 2)), Text(check.verdict, style))
        if check.cause:
            cause = check.cause if check.cause != told else "as above"
            told = check.cause
            drawn.add_row(Padding(Text(f"cause: {cause}", style), (0, 0, 0, 4)), "")
    with console.capture() as captured:
        console.print(drawn)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*lines, "", summary(checks)])


def summary(checks: Sequence[Check]) -> str:
    """`38 checks: 36 pass, 1 note, 1 fail`."""
    counts = collections.Counter[str](check.verdict for check in checks)
    listed = [f"{counts[verdict]} {verdict}" for verdict in _STYLES if counts[verdict]]
    return f"{len(checks)} check{'s' if len(checks) != 1 else ''}: {', '.join(listed)}"


def merged(checks: Sequence[Check]) -> list[Check]:
    """The checks, with neighbours that pass, or are skipped, for the same reason made one."""
    shown: list[Check] = []
    for _, group in itertools.groupby(enumerate(checks), key=lambda each: _alike(*each)):
        several = [check for _, check in group]
        shown.append(several[0] if len(several) == 1 else _one(several))
    return shown


def _alike(number: int, check: Check) -> tuple[object, ...]:
    """What neighbours that are shown as one have in common."""
    if check.verdict in (FAIL, NOTE):
        return (number,)
    if check.subject == "parity":
        reason = check.found if check.verdict == SKIP else ""
        return check.subject, _mode(check), check.verdict, reason, "largest" in check.figures
    return check.subject, check.verdict, check.found


def _one(checks: Sequence[Check]) -> Check:
    first = checks[0]
    if first.subject != "parity":
        return dataclasses.replace(first, case=" · ".join(check.case for check in checks))
    batches = dict.fromkeys(check.case.split(", ")[-1] for check in checks)
    parts = dict.fromkeys(check.case.split(", ")[1] for check in checks)
    split = [part for part in parts if part.endswith("micro-batches")]
    also = f"; and in {' and '.join(split)}" if split else ""
    case = f"{_mode(first)} ({', '.join(batches)}{also})"
    largest = [check.figures["largest"] for check in checks if "largest" in check.figures]
    if not largest:
        return dataclasses.replace(first, case=case)
    found = f"{first.found.partition(', to ')[0]}, to {max(largest):.1e} of each leaf's scale"
    return dataclasses.replace(first, case=case, found=found)


def _mode(check: Check) -> str:
    return check.case.partition(", ")[0]

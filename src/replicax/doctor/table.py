"""The doctor's rows as a table that fits a terminal, and as JSON."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from replicax.doctor.row import OK, PROBLEM, SKIPPED, WARNING, Row
from replicax.errors import require
from replicax.wording import size_text

_NO_BREAK = "\ue000"
"""Of no alphabet; rich breaks lines at the usual no-break space too."""
_SHORT = 24
_STYLES = {OK: "green", WARNING: "yellow", PROBLEM: "bold red", SKIPPED: "dim"}


def print_table(rows: Sequence[Row], most_columns: int) -> None:
    """Check, what was found and the verdict of each row, and the fix below it; then a summary."""
    require("rich", "cli")
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table.grid(padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    drawn.add_column(no_wrap=True)
    drawn.add_column(ratio=1, overflow="fold")
    drawn.add_column(no_wrap=True)
    before = None
    for row in rows:
        style = _STYLES[row.verdict]
        name = "" if row.check == before else row.check
        before = row.check
        quiet = "dim" if row.verdict == SKIPPED else ""
        drawn.add_row(Text(name, "bold"), Text(_kept(row.found), quiet), Text(row.verdict, style))
        if row.fix and row.verdict in (WARNING, PROBLEM):
            drawn.add_row("", Text(f"fix: {row.fix}", style), "")
        for line in _speeds(row.figures):
            drawn.add_row("", Text(line, "dim", no_wrap=True), "")
    terminal = Console(highlight=False)
    console = Console(highlight=False, width=min(most_columns, terminal.width))
    with console.capture() as captured:
        console.print(drawn)
    lines = captured.get().replace(_NO_BREAK, " ").splitlines()
    print(*(line.rstrip() for line in lines), f"\n{summary(rows)}", sep="\n", flush=True)


def summary(rows: Sequence[Row]) -> str:
    """How many problems and warnings there are, and in which checks."""
    counted = []
    for verdict in (PROBLEM, WARNING):
        checks = collections.Counter(row.check for row in rows if row.verdict == verdict)
        if checks:
            count = sum(checks.values())
            plural = "s" if count > 1 else ""
            counted.append(f"{count} {verdict}{plural} ({', '.join(checks)})")
    return " and ".join(counted) or "no problem found"


def to_json(rows: Sequence[Row], verdict: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """The same for programs: `about` the job, `verdict` of the whole, and `rows`."""
    return {**about, "verdict": verdict, "rows": [dataclasses.asdict(row) for row in rows]}


def _kept(text: str) -> str:
    """`text` with what belongs together in one line: the short parts of a list with dots."""
    parts = text.split(" · ")
    if len(parts) == 1:
        return text
    return " · ".join(
        part.replace(" ", _NO_BREAK) if len(part) <= _SHORT else part for part in parts
    )


def _speeds(figures: Mapping[str, Any]) -> list[str]:
    """The all-reduce's speed by size, where the row is about that."""
    sizes = figures.get("sizes", [])
    if not sizes:
        return []
    cells: list[tuple[str, ...]] = [("size", "time", "GB/s", "bus GB/s")]
    for each in sizes:
        rates = (each[f"{of}_bytes_per_second"] / 1e9 for of in ("algorithm", "bus"))
        milliseconds = f"{1e3 * each['seconds']:,.3g} ms"
        cells.append((size_text(each["size_bytes"]), milliseconds, *map("{:.3g}".format, rates)))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]

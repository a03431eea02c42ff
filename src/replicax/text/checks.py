"""Checks with verdicts, and the table that verify, doctor and lint print them in."""

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from replicax.errors import MissingDependencyError, require
from replicax.text.blocks import Grid
from replicax.text.table import NO_BREAK, WIDTH, rendered, width
from replicax.text.wording import counted

Verdict = Literal["pass", "fail", "note", "skip"]
PASS: Final[Literal["pass"]] = "pass"
FAIL: Final[Literal["fail"]] = "fail"
NOTE: Final[Literal["note"]] = "note"
SKIP: Final[Literal["skip"]] = "skip"

_STYLES: Mapping[Verdict, str] = {PASS: "green", NOTE: "yellow", FAIL: "bold red", SKIP: "dim"}
_SHORT = 24


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check in one case."""

    subject: str
    """The heading it is listed under: "parity", "clocks", a file."""
    case: str
    """Where: "full batch", "shard_map, 2 micro-batches"; may be empty."""
    verdict: Verdict
    found: str
    """The finding, with its figures; for `skip`, the reason it was skipped."""
    cause: str = ""
    """The likely cause of a failure, and its fix."""
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The figures as JSON values, for programs."""


@dataclasses.dataclass(frozen=True)
class Style:
    """Differences between the tables of two commands."""

    remedy: str = "cause"
    """The word before a check's `cause`, such as "fix"."""
    words: Mapping[Verdict, str] = dataclasses.field(default_factory=dict)
    """Replacement words for verdicts: `{PASS: "ok", NOTE: "warning"}`."""
    below: Callable[[Check], Sequence[str]] = lambda _check: ()
    """Returns lines to print verbatim below a check."""
    width: int = WIDTH
    """Maximum number of columns; a narrower terminal gets fewer."""


DEFAULT = Style()


def print_table(
    checks: Sequence[Check], total: str | None = None, *, style: Style = DEFAULT
) -> None:
    """Print the table of `table_text`, in color on a terminal.

    Args:
        checks: in the order to print; consecutive checks of one subject share its heading.
        total: the last line; by default `summary(checks)`.
        style: settings specific to the command.
    """
    require("rich", "cli")
    from rich.console import Console

    console = Console(highlight=False, width=min(style.width, width()))
    print(_drawn(checks, total, console, style), flush=True)


class RowPrinter:
    """Prints a table that grows, in color on a terminal.

    The rows of a subject are printed below its heading, as in the whole table.
    """

    def __init__(self, write: Callable[[str], None], *, style: Style = DEFAULT) -> None:
        require("rich", "cli")
        from rich.console import Console

        self._console = Console(highlight=False, width=min(style.width, width()))
        self._write, self._style, self._printed = write, style, 0

    def __call__(self, checks: Sequence[Check]) -> None:
        """Print the rows of `checks` that were not in earlier calls, whose rows come first."""
        lines = _lines(checks, self._console, self._style)
        for line in lines[self._printed :]:
            self._write(line)
        self._printed = len(lines)


def table_text(checks: Sequence[Check], total: str | None = None, *, style: Style = DEFAULT) -> str:
    """Return a table of each check's subject, case, finding and verdict, with its cause below.

    Subjects are headings, or a separate column if no check has a case. Without rich, each check is
    one line.
    """
    try:
        require("rich", "cli")
    except MissingDependencyError:
        lines = [
            f"{_word(each, style)}  {', '.join(filter(None, (each.subject, each.case)))}: "
            f"{each.found}"
            for each in checks
        ]
        return "\n".join([*lines, checks_summary(checks, style=style) if total is None else total])
    return _drawn(checks, total, None, style)


def checks_grid(checks: Sequence[Check], *, style: Style = DEFAULT) -> Grid:
    """Return the checks as a table for a notebook, without the lines below them."""
    rows, before, told = [("check", "case", "found", "")], None, ""
    for check in checks:
        subject = check.subject if check.subject != before else ""
        found = check.found
        if check.cause:
            found += f"\n{style.remedy}: {check.cause if check.cause != told else 'as above'}"
            told = check.cause
        before = check.subject
        rows.append((subject, check.case, found, _word(check, style)))
    return Grid(rows, left=len(rows[0]), marked=frozenset({style.words.get(FAIL, FAIL)}))


def checks_summary(checks: Sequence[Check], *, style: Style = DEFAULT) -> str:
    """Return a line such as `38 checks: 36 pass, 1 note, 1 fail`."""
    counts = collections.Counter[str](check.verdict for check in checks)
    listed = [f"{counts[each]} {style.words.get(each, each)}" for each in _STYLES if counts[each]]
    return f"{counted(len(checks), 'check')}: {', '.join(listed)}"


def _drawn(checks: Sequence[Check], total: str | None, console: Any, style: Style) -> str:
    lines = _lines(checks, console, style)
    return "\n".join([*lines, "", checks_summary(checks, style=style) if total is None else total])


def _lines(checks: Sequence[Check], console: Any, style: Style) -> list[str]:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    headings = any(check.case for check in checks)
    drawn = Table.grid(padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    if not headings:
        drawn.add_column(no_wrap=True)
    drawn.add_column(ratio=1, overflow="fold")
    drawn.add_column(no_wrap=True)

    def add(content: Any, verdict: Any = "", subject: str = "", indent: int = 0) -> None:
        if headings:
            drawn.add_row(Padding(content, (0, 0, 0, indent)), verdict)
        else:
            drawn.add_row(Text(subject, "bold"), content, verdict)

    before, told = None, ""
    for check in checks:
        color = _STYLES[check.verdict]
        subject = check.subject if check.subject != before else ""
        if headings and subject:
            add(Text(subject, "bold"))
        before = check.subject
        text = _kept(f"{check.case}: {check.found}" if check.case else check.found)
        line = Text(text, "dim" if check.verdict == SKIP else "")
        add(line, Text(_word(check, style), color), subject, 2)
        if check.cause:
            cause = check.cause if check.cause != told else "as above"
            told = check.cause
            add(Text(f"{style.remedy}: {cause}", color), indent=4)
        for each in style.below(check):
            add(Text(each, "dim", no_wrap=True), indent=4)
    return rendered(drawn, console, columns=style.width)


def _word(check: Check, style: Style) -> str:
    return style.words.get(check.verdict, check.verdict)


def _kept(text: str) -> str:
    """Return `text` without line breaks inside the short parts of a list separated by dots."""
    parts = text.split(" · ")
    if len(parts) == 1:
        return text
    return " · ".join(
        part.replace(" ", NO_BREAK) if len(part) <= _SHORT else part for part in parts
    )

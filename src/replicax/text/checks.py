"""Checks with verdicts, and the table that verify, doctor and lint print them in."""

import collections
import dataclasses
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from replicax.text.blocks import Grid
from replicax.text.table import NO_BREAK, WIDTH, width, wrapped
from replicax.text.wording import counted

Verdict = Literal["pass", "fail", "note", "skip"]
PASS: Final[Literal["pass"]] = "pass"
FAIL: Final[Literal["fail"]] = "fail"
NOTE: Final[Literal["note"]] = "note"
SKIP: Final[Literal["skip"]] = "skip"

_COLORS: Mapping[Verdict, str] = {PASS: "32", NOTE: "33", FAIL: "1;31", SKIP: "2"}
"""Codes of a terminal, as are `_BOLD` and `_DIM`."""
_BOLD, _DIM = "1", "2"
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
    word: Callable[[Check], str] = lambda _check: ""
    """Returns the word for the verdict of one check, or nothing."""
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
    columns = min(style.width, width())
    print(_drawn(checks, total, columns, style, colored=_shows_colors()), flush=True)


class RowPrinter:
    """Prints a table that grows, in color on a terminal.

    The rows of a subject are printed below its heading, as in the whole table.
    """

    def __init__(self, write: Callable[[str], None], *, style: Style = DEFAULT) -> None:
        self._write, self._style, self._printed = write, style, 0

    def __call__(self, checks: Sequence[Check]) -> None:
        """Print the rows of `checks` that were not in earlier calls, whose rows come first."""
        columns = min(self._style.width, width())
        lines = _lines(checks, columns, self._style, colored=_shows_colors())
        for line in lines[self._printed :]:
            self._write(line)
        self._printed = len(lines)


def table_text(checks: Sequence[Check], total: str | None = None, *, style: Style = DEFAULT) -> str:
    """Return a table of each check's subject, case, finding and verdict, with its cause below.

    Subjects are headings, or a separate column if no check has a case.
    """
    return _drawn(checks, total, style.width, style, colored=False)


def checks_grid(checks: Sequence[Check], *, style: Style = DEFAULT) -> Grid:
    """Return the checks as a table for a notebook, without the lines below them."""
    rows, before, last_cause = [("check", "case", "found", "")], None, ""
    for check in checks:
        subject = check.subject if check.subject != before else ""
        found = check.found
        if check.cause:
            found += f"\n{style.remedy}: {check.cause if check.cause != last_cause else 'as above'}"
            last_cause = check.cause
        before = check.subject
        rows.append((subject, check.case, found, _word(check, style)))
    return Grid(rows, left=len(rows[0]), marked=frozenset({style.words.get(FAIL, FAIL)}))


def checks_summary(checks: Sequence[Check], *, style: Style = DEFAULT) -> str:
    """Return a line such as `38 checks: 36 pass, 1 note, 1 fail`."""
    counts = collections.Counter[str](check.verdict for check in checks)
    listed = [f"{counts[each]} {style.words.get(each, each)}" for each in _COLORS if counts[each]]
    return f"{counted(len(checks), 'check')}: {', '.join(listed)}"


def _shows_colors() -> bool:
    dumb = os.environ.get("TERM") in ("dumb", "unknown")
    return sys.stdout.isatty() and not dumb and not os.environ.get("NO_COLOR")


def _drawn(
    checks: Sequence[Check], total: str | None, columns: int, style: Style, *, colored: bool
) -> str:
    lines = _lines(checks, columns, style, colored=colored)
    last = checks_summary(checks, style=style) if total is None else total
    return "\n".join([*lines, "", last] if lines else [last])


def _lines(checks: Sequence[Check], columns: int, style: Style, *, colored: bool) -> list[str]:
    """Return the table: each finding, wrapped, and its verdict in the last column."""
    headings = any(check.case for check in checks)
    last = max((len(_word(check, style)) for check in checks), default=0)
    first = 0 if headings else max((len(check.subject) for check in checks), default=0) + 2
    room, lines = columns - first - last - 2, list[str]()

    def ink(text: str, color: str) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if colored and color and text.strip() else text

    def add(text: str, color: str, indent: int = 0, subject: str = "", check: Any = None) -> None:
        blank = " " * (indent if headings else 0)
        for line in wrapped(text, room, blank, blank):
            tail = ""
            if check is not None:
                space = " " * (room - len(line) + 2)
                tail = f"{space}{ink(_word(check, style), _COLORS[check.verdict])}"
            head = ink(subject, _BOLD) + " " * (first - len(subject))
            lines.append(f"{head}{ink(line, color)}{tail}".rstrip())
            subject, check = "", None  # beside the first line only

    before, last_cause = None, ""
    for check in checks:
        subject = check.subject if check.subject != before else ""
        before = check.subject
        if headings and subject:
            lines.append(ink(subject, _BOLD))
        text = _kept(f"{check.case}: {check.found}" if check.case else check.found)
        beside = "" if headings else subject
        add(text, _DIM if check.verdict == SKIP else "", 2, beside, check)
        if check.cause:
            cause = check.cause if check.cause != last_cause else "as above"
            last_cause = check.cause
            add(f"{style.remedy}: {cause}", _COLORS[check.verdict], 4)
        blank = " " * (first or 4)
        for below in style.below(check):  # as far as a line has room
            lines += [ink(line, _DIM) for line in wrapped(below, first + room, blank, blank)[:1]]
    return lines


def _word(check: Check, style: Style) -> str:
    return style.word(check) or style.words.get(check.verdict, check.verdict)


def _kept(text: str) -> str:
    """Return `text` without line breaks inside the short parts of a list separated by dots."""
    parts = text.split(" · ")
    if len(parts) == 1:
        return text
    return " · ".join(
        part.replace(" ", NO_BREAK) if len(part) <= _SHORT else part for part in parts
    )

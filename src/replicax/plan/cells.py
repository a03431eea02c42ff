"""Formatting for a plan's screen: short numbers, margin labels, columns."""

import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence

from replicax.wording import duration, size_text

WIDTH = 80
MARGIN = 7
"""Width of the label at the start of a line."""
_LEAST_ROOM = 24
"""Least width for text beside figures; if there is less, the text goes below them."""
_GAP = "  "
_NO_BREAK = "\ue000"
"""A private-use character that stands for a non-breaking space."""
_FIGURE = re.compile(r"(?<=\d)([MGT]?) (?=[kMGTmµ]?[Bs]\b|rows?\b|x\b|devices?\b|h\b|min\b)")
"""The space between a figure and its unit, where lines must not break."""

Line = Sequence[str]
"""A name, figures, and trailing text, which may be empty."""


def line(word: str, text: str) -> list[str]:
    """Wrap a text, with its label in the margin of the first line."""
    wrapped = textwrap.wrap(
        _FIGURE.sub(rf"\1{_NO_BREAK}", text),
        WIDTH,
        initial_indent=word.ljust(MARGIN),
        subsequent_indent=" " * MARGIN,
        break_on_hyphens=False,
    )
    return [each.replace(_NO_BREAK, " ") for each in wrapped]


def columns(word: str, lines: Sequence[Line]) -> list[str]:
    """Align lines in columns, with a label in the margin of the first.

    Args:
        word: the label, at most 6 letters.
        lines: lines of equal length; names and texts are left-aligned, figures right-aligned.
    """
    widths = [max(map(len, cells)) for cells in zip(*(each[1:-1] for each in lines), strict=True)]
    room = WIDTH - MARGIN - sum(widths) - len(_GAP) * len(widths)
    name_width = min(room, max(len(each[0]) for each in lines))
    drawn = itertools.chain.from_iterable(
        _drawn(each, name_width, widths, room - name_width - len(_GAP)) for each in lines
    )
    first, *rest = drawn
    return [f"{word.ljust(MARGIN)}{first}".rstrip(), *(f"{'':{MARGIN}}{text}" for text in rest)]


def _drawn(cells: Line, name_width: int, widths: Sequence[int], room: int) -> Iterator[str]:
    name, *figures, beside = cells
    *before, last = textwrap.wrap(name, name_width) or [""]
    yield from before
    padded = [figure.rjust(width) for figure, width in zip(figures, widths, strict=True)]
    kept = _GAP.join([last.ljust(name_width), *padded])
    if len(beside) <= room:
        yield f"{kept}{_GAP}{beside}".rstrip()
        return
    aside = room >= _LEAST_ROOM
    parts = textwrap.wrap(beside, room if aside else WIDTH - MARGIN - len(_GAP))
    indent = " " * (len(kept) if aside else 0) + _GAP
    yield (kept + _GAP + parts.pop(0) if aside else kept).rstrip()
    yield from (indent + part for part in parts)


def short(value: float) -> str:
    """Format a count in at most 7 characters: `131,072`, `46.3M`."""
    if value < 999_999.5:
        decimals = 0 if value >= 99.95 or value == int(value) else 1 if value >= 9.995 else 2
        return f"{value:,.{decimals}f}"
    for unit, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if value < 999.5 * size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:.1e}"


def counted(number: float, noun: str) -> str:
    """`1 row`, `2 rows`."""
    return f"{short(number)} {noun}{'' if number == 1 else 's'}"


def percent(share: float) -> str:
    """`97%`, or `0.3%` below one percent."""
    return f"{share:.1%}" if 0 < share < 0.00995 else f"{share:.0%}"


def time_text(seconds: float) -> str:
    """`45.3 ms`: three digits, or minutes and hours for long times."""
    if seconds >= 59.5:
        return duration(seconds) if seconds < 3.6e6 else f"{short(seconds / 3600)} h"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:
            return f"{float(f'{seconds / size:.3g}'):g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def of_text(part: float, whole: float) -> str:
    """`11.2 of 16.9 GB`, or with both units if they differ."""
    first, second = size_text(part), size_text(whole)
    same = first.split()[-1] == second.split()[-1]
    return f"{first.split()[0] if same else first} of {second}"

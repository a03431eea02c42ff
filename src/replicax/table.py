"""Text tables and labelled lines that fit in 80 columns."""

import io
import itertools
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

WIDTH = 80
MARGIN = 7
"""Width of the label at the start of a line."""
NO_BREAK = "\ue000"
"""A private-use character where lines do not break: rich breaks them at a non-breaking space."""
_LEAST_ROOM = 24
"""Least width for text beside figures; if there is less, the text goes below them."""
_GAP = "  "
_FIGURE = re.compile(r"(?<=\d)([MGT]?) (?=[kMGTmµ]?[Bs]\b|rows?\b|x\b|devices?\b|h\b|min\b)")
"""The space between a figure and its unit, where lines must not break."""

Line = Sequence[str]
"""A name, figures, and trailing text, which may be empty."""


def labelled(label: str, text: str) -> list[str]:
    """Wrap a text, with its label in the margin of the first line."""
    wrapped = textwrap.wrap(
        _FIGURE.sub(rf"\1{NO_BREAK}", text),
        WIDTH,
        initial_indent=label.ljust(MARGIN),
        subsequent_indent=" " * MARGIN,
        break_on_hyphens=False,
    )
    return [each.replace(NO_BREAK, " ") for each in wrapped]


def columns(label: str, lines: Sequence[Line]) -> list[str]:
    """Align lines in columns, with a label in the margin of the first.

    Args:
        label: at most 6 letters.
        lines: lines of equal length; names and texts are left-aligned, figures right-aligned.
    """
    widths = [max(map(len, cells)) for cells in zip(*(each[1:-1] for each in lines), strict=True)]
    room = WIDTH - MARGIN - sum(widths) - len(_GAP) * len(widths)
    name_width = min(room, max(len(each[0]) for each in lines))
    drawn = itertools.chain.from_iterable(
        _drawn(each, name_width, widths, room - name_width - len(_GAP)) for each in lines
    )
    first, *rest = drawn
    return [f"{label.ljust(MARGIN)}{first}".rstrip(), *(f"{'':{MARGIN}}{text}" for text in rest)]


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


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Align the first `left` columns left and the others right.

    The first row has the headings; those of fewer lines stand at the bottom.
    """
    heads = [head.split("\n") for head in rows[0]]
    depth = max(map(len, heads))
    heads = [[""] * (depth - len(head)) + head for head in heads]
    lines = [*zip(*heads, strict=True), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    gap = _GAP if sum(widths) + len(_GAP) * (len(widths) - 1) <= WIDTH else " "
    return [
        gap.join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ]


def rendered(table: Any, console: Any = None, *, width: int = WIDTH) -> list[str]:
    """Render a table of rich, as for `console` or without colors in `width` columns."""
    from rich.console import Console

    if console is None:
        console = Console(
            width=width, file=io.StringIO(), markup=False, emoji=False, highlight=False
        )
    with console.capture() as captured:
        console.print(table)
    return [text.rstrip() for text in captured.get().replace(NO_BREAK, " ").splitlines()]

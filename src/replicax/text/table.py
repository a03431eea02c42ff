"""Text tables and labelled lines that fit the terminal, or 80 columns where there is none."""

import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

WIDTH = 80
"""Columns where there is no terminal, as in a pipe."""
MARGIN = 7
"""Width of the label at the start of a line."""
NO_BREAK = "\ue000"
"""A private-use character where lines do not break."""
_NARROWEST, _WIDEST = 24, 120
"""Columns at least, as of a window that is nearly closed, and at most, to be read with ease."""
_LEAST_ROOM = 24
"""Least width for text beside figures; if there is less, the text goes below them."""
_GAP = "  "
_FIGURE = re.compile(r"(?<=\d)([MGT]?) (?=[kMGTmµ]?[Bs]\b|rows?\b|x\b|devices?\b|h\b|min\b)")
"""The space between a figure and its unit, where lines must not break."""

_COLOR = re.compile(r"\x1b\[[\d;]*m")
_LABEL = re.compile(r"[a-z]+ +| +")
"""The margin of a line."""
_BESIDE = re.compile(r"( *)(\S.*?|(?<= {8}))  +(\S.*)")
"""An indent, a name, and after some spaces a text; without a name, what belongs to one above."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing them: escape sequences, directions."""

Line = Sequence[str]
"""A name, figures, and trailing text, which may be empty."""


def width() -> int:
    """Return the columns of the terminal, or `COLUMNS`; 80 where there is neither."""
    columns = shutil.get_terminal_size((WIDTH, 24)).columns
    return min(max(columns, _NARROWEST), _WIDEST)


def wrapped(text: str, columns: int, indent: str = "", first: str = "") -> list[str]:
    """Break a text into lines at words, which stay whole: they can be copied."""
    lines = textwrap.wrap(
        text,
        columns,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(NO_BREAK, " ") for line in lines]


def labelled(label: str, text: str) -> list[str]:
    """Wrap a text, with its label in the margin of the first line."""
    kept = _FIGURE.sub(rf"\1{NO_BREAK}", text)
    return wrapped(kept, width(), " " * MARGIN, label.ljust(MARGIN))


def fold_lines(text: str, columns: int | None = None) -> str:
    """Return lines, those that are longer than `columns`, by default `width()`, broken at words.

    The parts of a line stand below its text, right of its label or its name.
    """
    room = width() if columns is None else columns
    return "\n".join(part for line in text.split("\n") for part in _parts(line, room))


def printable(text: str) -> str:
    r"""Return text with control characters as their escapes, `\x1b`: a name may contain any."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def for_stream(text: str, stream: Any) -> str:
    """Return lines as they are, or fold_lines for a terminal."""
    return fold_lines(text) if stream.isatty() else text


def _parts(line: str, columns: int) -> list[str]:
    plain = _COLOR.sub("", line)
    if len(plain) <= columns or "\x1b" in plain:
        return [line]
    label, text = plain[:MARGIN], plain[MARGIN:]
    if _LABEL.fullmatch(label) and text[0] != " ":
        return wrapped(text, columns, " " * MARGIN, label)
    if beside := _BESIDE.fullmatch(plain):  # such as a command, and what it does
        below = " " * min(len(beside[1]) + 4, MARGIN - 1)
        name = [beside[1] + beside[2]] if beside[2] else []
        return [*name, *wrapped(beside[3], columns, below, below)]
    return wrapped(plain, columns, _GAP)


def columns(label: str, lines: Sequence[Line]) -> list[str]:
    """Align lines in columns, with a label in the margin of the first.

    Args:
        label: at most 6 letters.
        lines: lines of equal length; names and texts are left-aligned, figures right-aligned.
    """
    widths = [max(map(len, cells)) for cells in zip(*(line[1:-1] for line in lines), strict=True)]
    room = width() - MARGIN - sum(widths) - len(_GAP) * len(widths)
    name_width = min(room, max(len(line[0]) for line in lines))
    words = itertools.chain.from_iterable(line[0].split() for line in lines)
    if name_width < max(map(len, words), default=0):
        drawn = itertools.chain.from_iterable(map(_stacked, lines))
    else:
        drawn = itertools.chain.from_iterable(
            _drawn(line, name_width, widths, room - name_width - len(_GAP)) for line in lines
        )
    first, *rest = drawn
    return [f"{label.ljust(MARGIN)}{first}".rstrip(), *(f"{'':{MARGIN}}{text}" for text in rest)]


def _stacked(cells: Line) -> Iterator[str]:
    """Yield a line whose name has no room beside the figures, which follow below it."""
    name, *figures, beside = cells
    yield from wrapped(name, width() - MARGIN)
    kept = _GAP.join([*(each.replace(" ", NO_BREAK) for each in figures if each), beside])
    yield from wrapped(kept, width() - MARGIN, _GAP, _GAP)


def _drawn(cells: Line, name_width: int, widths: Sequence[int], room: int) -> Iterator[str]:
    name, *figures, beside = cells
    *before, last = wrapped(name, name_width) or [""]
    yield from before
    padded = [figure.rjust(width) for figure, width in zip(figures, widths, strict=True)]
    kept = _GAP.join([last.ljust(name_width), *padded])
    if len(beside) <= room:
        yield f"{kept}{_GAP}{beside}".rstrip()
        return
    aside = room >= _LEAST_ROOM
    parts = wrapped(beside, room if aside else width() - MARGIN - len(_GAP))
    indent = " " * (len(kept) if aside else 0) + _GAP
    yield (kept + _GAP + parts.pop(0) if aside else kept).rstrip()
    yield from (indent + part for part in parts)


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Align the first `left` columns left and the others right.

    The first row has the headings; those of fewer lines stand at the bottom. Where that is too wide
    for the terminal, each row is a paragraph.
    """
    heads = [head.split("\n") for head in rows[0]]
    depth = max(map(len, heads))
    heads = [[""] * (depth - len(head)) + head for head in heads]
    lines = [*zip(*heads, strict=True), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    gap = _GAP if sum(widths) + len(_GAP) * (len(widths) - 1) <= width() else " "
    if width() < min(sum(widths) + len(widths) - 1, WIDTH):
        return [line for cells in rows[1:] for line in _paragraph(rows[0], cells, left)]
    return [
        gap.join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ]


def _paragraph(heads: Sequence[str], cells: Sequence[str], left: int) -> list[str]:
    """Return a row as lines: the first `left` cells, and below them the others with their heads."""
    words = (head.replace("-\n", "").replace("\n", " ") for head in heads)
    named = [f"{word} {cell}" for word, cell in zip(words, cells, strict=True)]
    others = " · ".join(each.replace(" ", NO_BREAK) for each in named[left:])
    return [_GAP.join(cells[:left]).rstrip(), *wrapped(others, width(), _GAP, _GAP)]

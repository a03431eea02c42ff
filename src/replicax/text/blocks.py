"""Blocks of a report, which are lines of text on a terminal and HTML in a notebook.

The HTML takes its colors from the page, light or dark, and loses nothing that matters where a
viewer removes styles.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Protocol

from replicax.text.table import Line, aligned, columns, labelled, width, wrapped

_RULE = "border-bottom:1px solid rgba(128,128,128,.35)"
_CELL = "padding:.15em .7em;vertical-align:top"
_LINES = "font-family:monospace;background:none;margin:.4em 0"
_MARKED = "color:#d9483b;font-weight:bold"
"""Readable on white and on black."""


class ReportBlock(Protocol):
    """A part of a report."""

    def lines(self) -> list[str]:
        """Return it as lines that fit the terminal."""

    def html(self) -> str:
        """Return it as HTML, escaped."""


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """A text; an empty one is an empty line."""

    text: str

    def lines(self) -> list[str]:
        return wrapped(self.text, width(), "  ") or [""]

    def html(self) -> str:
        return f"<div>{_text(self.text)}</div>"


GAP = Paragraph("")


@dataclasses.dataclass(frozen=True)
class Verbatim:
    """Lines as they are."""

    texts: Sequence[str]

    def lines(self) -> list[str]:
        return list(self.texts)

    def html(self) -> str:
        text = escape("\n".join(self.texts), quote=False)
        return f'<pre style="{_LINES}">{text}</pre>'


@dataclasses.dataclass(frozen=True)
class Bar:
    """How far something is."""

    done: int
    total: int

    def lines(self) -> list[str]:
        return []

    def html(self) -> str:
        style = "width:100%;max-width:560px"
        return f'<progress value="{self.done}" max="{self.total}" style="{style}"></progress>'


@dataclasses.dataclass(frozen=True)
class Entry:
    """A label of at most 6 letters, with a text or lines of a name, figures and a text."""

    label: str
    content: str | Sequence[Line]

    def lines(self) -> list[str]:
        if isinstance(self.content, str):
            return labelled(self.label, self.content)
        return columns(self.label, self.content)

    def html(self) -> str:
        if isinstance(self.content, str):
            shown = _text(self.content)
        else:
            shown = Grid(self.content, right=len(self.content[0]) - 2).html()
        style = f"{_CELL};text-align:left"
        label = _text(self.label)
        return f'<tr><th style="{style}">{label}</th><td style="{style}">{shown}</td></tr>'


@dataclasses.dataclass(frozen=True)
class Grid:
    """Rows of cells below their headings; the first `left` columns are aligned left."""

    rows: Sequence[Sequence[str]]
    """The headings first."""
    left: int = 1
    right: int | None = None
    """How many of the others are aligned right; by default all."""
    marked: frozenset[str] = frozenset()
    """Contents of cells that must be seen."""

    def lines(self) -> list[str]:
        return aligned(self.rows, self.left)

    def html(self) -> str:
        heads, *rows = self.rows
        shown = [self._row("th", [head.replace("-\n", "") for head in heads], _RULE)]
        shown += [self._row("td", row) for row in rows]
        return f'<table style="border-collapse:collapse">{"".join(shown)}</table>'

    def _row(self, tag: str, cells: Sequence[str], style: str = "") -> str:
        right = range(self.left, len(cells) if self.right is None else self.left + self.right)
        return "".join(
            [
                "<tr>",
                *(
                    f'<{tag} style="{_CELL};text-align:{"right" if place in right else "left"};'
                    f'{_MARKED if cell in self.marked else style}">{_text(cell)}</{tag}>'
                    for place, cell in enumerate(cells)
                ),
                "</tr>",
            ]
        )


def html_of(blocks: Iterable[ReportBlock], title: str = "") -> str:
    """Return a report as HTML; entries that follow one another share a table."""
    shown = [f"<div><b>{_text(title)}</b></div>"] if title else []
    for together, group in itertools.groupby(blocks, lambda block: isinstance(block, Entry)):
        inner = "".join(block.html() for block in group)
        shown.append(f"<table>{inner}</table>" if together else inner)
    return f'<div style="overflow-x:auto;line-height:1.4">{"".join(shown)}</div>'


@functools.singledispatch
def report_of(value: Any) -> list[ReportBlock]:
    """Return the report of a result; the module that writes it registers how."""
    return [Paragraph(repr(value))]


class Reported:
    """A result that is printed, and shown in a notebook, as its report."""

    def __str__(self) -> str:
        return "\n".join(line for block in report_of(self) for line in block.lines())

    def _repr_html_(self) -> str:
        return html_of(report_of(self))


def _text(text: str) -> str:
    return escape(text, quote=False).replace("\n", "<br>")

"""What a rule has found, and where."""

import ast
import dataclasses
from typing import Final, Literal, NamedTuple

Severity = Literal["error", "warning", "note"]
ERROR: Final[Literal["error"]] = "error"
"""Wrong numbers, or a call that fails."""
WARNING: Final[Literal["warning"]] = "warning"
"""Slow, wasteful, or wrong for some data."""
NOTE: Final[Literal["note"]] = "note"
"""Works today; there is a better way to write it."""


class Spot(NamedTuple):
    """Where in the file: line from 1, column from 0, and the column after the last."""

    line: int
    column: int
    end_column: int


@dataclasses.dataclass(frozen=True)
class Finding:
    """One error in the code, with its line, reason and fix."""

    line: int
    """From 1."""
    column: int
    """From 1, as editors count."""
    rule: str
    """The rule's name; `# replicax: ignore[NAME]` on the line silences it."""
    severity: Severity
    reason: str
    fix: str
    code: str
    """The line as it is in the file."""
    width: int = 1
    """How many characters of the line it is about."""


def spot(node: ast.AST) -> Spot:
    """Where `node` starts; what runs over several lines is marked on its first."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    one_line = getattr(node, "end_lineno", line) == line
    return Spot(line, column, getattr(node, "end_col_offset", column + 1) if one_line else -1)

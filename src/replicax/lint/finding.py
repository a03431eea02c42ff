"""What a rule has found and where, and the findings of one file while its rules run."""

import ast
import dataclasses
import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

Severity = Literal["error", "warning", "note"]
ERROR: Final[Literal["error"]] = "error"
"""Wrong numbers, or a call that fails."""
WARNING: Final[Literal["warning"]] = "warning"
"""Slow, wasteful, or wrong for some data."""
NOTE: Final[Literal["note"]] = "note"
"""Works today; there is a better way to write it."""
_IGNORE = re.compile(r"#.*\breplicax:\s*ignore(?:\[([\w\s,-]*)\])?")


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


class Report:
    """Findings by line; one of a rule and line, however often a rule comes by."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._found: dict[tuple[str, int], Finding] = {}

    def add(
        self, rule: str, node: ast.AST, reason: str, fix: str, severity: Severity = ERROR
    ) -> None:
        """Add a finding, unless its line says `# replicax: ignore` or has it already."""
        where = spot(node)
        code = self._lines[where.line - 1] if where.line <= len(self._lines) else ""
        if self.ignores(rule, where.line):
            return
        # The tree counts bytes.
        start = len(code.encode()[: where.column].decode(errors="ignore"))
        end = len(code.rstrip()) if where.end_column < 0 else where.end_column
        finding = Finding(
            where.line, start + 1, rule, severity, reason, fix, code, max(1, end - start)
        )
        self._found.setdefault((rule, where.line), finding)

    def findings(self) -> list[Finding]:
        """Return all of them, from the top of the file down."""
        return sorted(self._found.values(), key=lambda one: (one.line, one.column, one.rule))

    def ignores(self, rule: str, line: int) -> bool:
        """Whether a line, or a comment alone above it, silences a rule there."""
        code = self._lines[line - 1] if line <= len(self._lines) else ""
        above = self._lines[line - 2].strip() if 2 <= line <= len(self._lines) + 1 else ""
        for text in (code, above if above.startswith("#") else ""):
            match = _IGNORE.search(text)
            if match and (not match[1] or rule in re.split(r"[\s,]+", match[1])):
                return True
        return False


def spot(node: ast.AST) -> Spot:
    """Return where `node` starts; what runs over several lines is marked on its first."""
    line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
    one_line = getattr(node, "end_lineno", line) == line
    return Spot(line, column, getattr(node, "end_col_offset", column + 1) if one_line else -1)

"""A finding, with its place and its fix, and the findings of one file while its rules run."""

import ast
import dataclasses
import re
from collections.abc import Sequence
from typing import Final, Literal

Severity = Literal["error", "warning", "note"]
ERROR: Final[Literal["error"]] = "error"
"""Wrong numbers, or a call that fails."""
WARNING: Final[Literal["warning"]] = "warning"
"""Slow, wasteful, or wrong for some data."""
NOTE: Final[Literal["note"]] = "note"
"""Works today; there is a better way to write it."""
_IGNORE = re.compile(r"#.*\breplicax:\s*ignore(?:\[([\w\s,-]*)\])?")


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


class Report:
    """Findings by line; one of a rule and line, however often a rule comes by."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._found: dict[tuple[str, int], Finding] = {}

    def add(
        self, rule: str, node: ast.AST, reason: str, fix: str, severity: Severity = ERROR
    ) -> None:
        """Add a finding, unless its line says `# replicax: ignore` or has it already."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        if self.ignores(rule, line):
            return
        code = self._lines[line - 1] if line <= len(self._lines) else ""
        start = len(code.encode()[:column].decode(errors="ignore"))  # the tree counts bytes
        finding = Finding(line, start + 1, rule, severity, reason, fix, code)
        self._found.setdefault((rule, line), finding)

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

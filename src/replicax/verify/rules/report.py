"""The findings of one file while its rules run."""

import re
from collections.abc import Sequence

from replicax.verify.rules.finding import ERROR, Finding, Severity, Spot

_IGNORE = re.compile(r"#.*\breplicax:\s*ignore(?:\[([\w\s,-]*)\])?")


class Report:
    """Findings by line; one of a rule and line, however often the walk comes by."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = lines
        self._found: dict[tuple[str, int], Finding] = {}

    def add(
        self, rule: str, where: Spot, reason: str, fix: str, severity: Severity = ERROR
    ) -> None:
        """Note a finding, unless its line says `# replicax: ignore` or has it already."""
        code = self.lines[where.line - 1] if where.line <= len(self.lines) else ""
        if self._ignored(rule, where.line, code):
            return
        # The tree counts bytes.
        start = len(code.encode()[: where.column].decode(errors="ignore"))
        end = len(code.rstrip()) if where.end_column < 0 else where.end_column
        finding = Finding(
            where.line, start + 1, rule, severity, reason, fix, code, max(1, end - start)
        )
        self._found.setdefault((rule, where.line), finding)

    def findings(self) -> list[Finding]:
        """All of them, from the top of the file down."""
        return sorted(self._found.values(), key=lambda one: (one.line, one.column, one.rule))

    def _ignored(self, rule: str, line: int, code: str) -> bool:
        above = self.lines[line - 2].strip() if 2 <= line <= len(self.lines) + 1 else ""
        for text in (code, above if above.startswith("#") else ""):
            match = _IGNORE.search(text)
            if match and (not match[1] or rule in re.split(r"[\s,]+", match[1])):
                return True
        return False

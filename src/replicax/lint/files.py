"""Run all rules on files and folders, and format findings as JSON or annotations.

| rule | finds |
|---|---|
| removed-api, bad-call, old-api | names and calls that the installed libraries do not support |
| fetched-every-step, compiled-in-loop | host transfers and compilations in every iteration |
| frozen-value | a variable captured by a compiled function and assigned again later |
| remainder | a batch split by a reshape that works only for some sizes |
| mean-of-batches | a mean of batches' values, of which the last is short for some sizes |
| no-reduction, mean-of-means, shared-key, local-scale, local-batch-norm | wrong numbers |

`# replicax: ignore[RULE]` on the line, or alone on the line above, silences a rule there.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from replicax.errors import ConfigError
from replicax.lint.batch_means import check_batch_means
from replicax.lint.frozen import check_frozen
from replicax.lint.lookup import check_names
from replicax.lint.loops import check_loops, check_reshapes
from replicax.lint.numeric_rules import check_steps
from replicax.lint.parsed import ERROR, NOTE_LEVEL, WARNING, Finding, ParsedFile
from replicax.lint.ranks import check_rank_rules
from replicax.text.wording import counted

_SKIPPED = {"__pycache__", "node_modules", "build", "dist", "site-packages"}
_CHECKS = (
    *(check_loops, check_reshapes, check_batch_means, check_steps, check_frozen),
    check_rank_rules,
)


@dataclasses.dataclass(frozen=True)
class FileFindings:
    """The findings of one file."""

    path: Path
    findings: list[Finding]
    """In file order."""
    not_installed: list[str]
    """Imported libraries that are not installed, whose names were not checked."""

    @property
    def fails(self) -> bool:
        """Whether there are findings other than notes."""
        return any(finding.severity != NOTE_LEVEL for finding in self.findings)


def python_files(paths: Iterable[Path]) -> list[Path]:
    """Return the given files and the Python files in the given folders, without duplicates."""
    files: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            files[path] = None
            continue
        below = [
            each
            for each in sorted(path.rglob("*.py"))
            if not any(
                part in _SKIPPED or part.startswith(".")
                for part in each.relative_to(path).parts[:-1]
            )
        ]
        if not below:
            raise ConfigError(f"{path} has no .py file in it; pass files, or another folder")
        files.update(dict.fromkeys(below))
    return list(files)


def examine_file(path: Path) -> FileFindings:
    """Run every rule on a Python file, without executing or importing it."""
    text = source_text(path)
    try:
        program = ParsedFile(text, path)
        absent = check_names(program)
        for check in _CHECKS:
            check(program)
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is nested too deeply to analyze: split it") from error
    return FileFindings(path, program.findings(), absent)


def annotations(examination: FileFindings) -> Iterator[str]:
    """Yield findings as GitHub workflow commands, which GitHub shows next to the lines."""
    kinds = {ERROR: "error", WARNING: "warning", NOTE_LEVEL: "notice"}
    for finding in examination.findings:
        place = f"file={examination.path},line={finding.line},col={finding.column}"
        message = f"{finding.reason}; {finding.fix}".replace("%", "%25").replace("\n", "%0A")
        yield f"::{kinds[finding.severity]} {place},title={finding.rule}::{message}"


def lint_summary(examinations: Sequence[FileFindings]) -> str:
    """Return a one-line summary of all files."""
    counts = collections.Counter(one.severity for each in examinations for one in each.findings)
    files = counted(len(examinations), "file")
    kinds = [counted(counts[kind], kind) for kind in (ERROR, WARNING, NOTE_LEVEL) if counts[kind]]
    said = f"{', '.join(kinds)} in {files}" if kinds else f"nothing found in {files}"
    absent = dict.fromkeys(name for each in examinations for name in each.not_installed)
    return f"{said}; not installed, so not checked: {', '.join(absent)}" if absent else said


def lint_json(examinations: Sequence[FileFindings]) -> dict[str, Any]:
    """Return the findings as JSON values."""
    return {
        "fails": any(each.fails for each in examinations),
        "summary": lint_summary(examinations),
        "files": [
            {
                "path": str(each.path),
                "not_installed": each.not_installed,
                "findings": [dataclasses.asdict(finding) for finding in each.findings],
            }
            for each in examinations
        ],
    }


def source_text(path: Path) -> str:
    """Return the text of a Python file."""
    if path.suffix == ".ipynb":
        raise ConfigError(
            f"{path} is a notebook; write its cells to a file: jupyter nbconvert --to script "
            f"{path.name}"
        )
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file; pass the path of a .py file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text; pass a .py file in UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check it") from error

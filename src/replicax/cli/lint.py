"""`replicax lint`: check source code for common errors, without running it."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from replicax.cli.flags import BY_PLACE, parse, shown_as
from replicax.cli.output import JsonOptions
from replicax.errors import ConfigError
from replicax.lint.files import (
    FileFindings,
    annotations,
    examine_file,
    lint_json,
    lint_summary,
    python_files,
    source_text,
)
from replicax.lint.step_file import step_file
from replicax.text.checks import FAIL, NOTE, Check, Style, print_table

_STYLE = Style(
    remedy="fix",
    below=lambda check: [check.figures["code"]],
    word=lambda check: str(check.figures["severity"]),
)


@dataclasses.dataclass(frozen=True)
class LintOptions(JsonOptions):
    """Checks files for common errors in data-parallel JAX, without running or importing them.

    The exit code is 1 if an error or a warning is found.
    """

    paths: Annotated[tuple[Path, ...], BY_PLACE, shown_as("FILES")] = ()
    """Python files, and folders to look for them in."""
    step_file: Annotated[Path | None, shown_as("FILE", "none")] = None
    """From this training script, write the file that verify --step needs, with gaps to fill in."""
    github: bool = "GITHUB_ACTIONS" in os.environ
    """Print findings as GitHub annotations; the default in GitHub workflows."""


def lint(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("lint", LintOptions, arguments)
    if options.step_file is not None:
        return _write_step_file(options.step_file)
    if not options.paths:
        raise ConfigError("no files to read; give .py files or folders: replicax lint train.py")
    with options.working():
        examined = [examine_file(path) for path in python_files(options.paths)]
    options.write_json(lint_json(examined))
    if not options.json:
        if options.github:
            print(*(line for each in examined for line in annotations(each)), sep="\n")
            print(lint_summary(examined), flush=True)
        else:
            checks = [check for each in examined for check in _checks(each)]
            print_table(checks, lint_summary(examined), style=_STYLE)
    return int(any(each.fails for each in examined))


def _write_step_file(path: Path) -> int:
    to = Path(f"{path.stem}_step.py")
    if os.path.lexists(to):
        raise ConfigError(f"{to} already exists; move it away, or use it with verify --step")
    source = step_file(source_text(path), path, to)
    to.write_text(source)
    unfilled = [line for line in source.splitlines() if line.startswith("raise ")]
    print(f"wrote {to}{': ' if unfilled else ''}{'fill in what it names first' * len(unfilled)}")
    print(f"replicax verify --step {to}:step --reference {to}:reference")
    return 0


def _checks(examination: FileFindings) -> Iterator[Check]:
    for finding in examination.findings:
        yield Check(
            str(examination.path),
            f"{finding.line}:{finding.column} {finding.rule}",
            NOTE if finding.severity == "note" else FAIL,
            finding.reason,
            finding.fix,
            {"code": finding.code.strip(), "severity": finding.severity},
        )

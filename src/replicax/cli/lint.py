"""`replicax lint`: source code read for the classic errors, without running it."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from replicax.cli.flags import parse_options, positional, shown_as
from replicax.cli.output import check_json, with_value, write_json
from replicax.errors import ConfigError
from replicax.lint.lint import annotations, examine, python_files, summary, text_lines, to_json

PROGRAM = "replicax lint"


@dataclasses.dataclass(frozen=True)
class LintOptions:
    """Reads files for the classic errors of data-parallel JAX; runs and imports nothing of them.

    The exit code is 1 where an error or a warning is found.
    """

    paths: Annotated[tuple[Path, ...], positional(), shown_as("FILES")] = ()
    """Python files, and folders to look for them in."""
    json: str | None = None
    """Write all findings as JSON to this file; - prints them instead."""
    github: bool = "GITHUB_ACTIONS" in os.environ
    """Print findings as annotations, which GitHub shows beside the lines; by default in its
    workflows."""


def lint(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse_options(LintOptions, with_value(arguments), PROGRAM)
    check_json(options.json)
    if not options.paths:
        raise ConfigError("no files to read; give .py files or folders: replicax lint train.py")
    found = [examine(path) for path in python_files(options.paths)]
    write_json(to_json(found), options.json)
    if options.json != "-":
        for each in found:
            lines: Iterator[str] = annotations(each) if options.github else text_lines(each)
            for line in lines:
                print(line)
        print(summary(found), flush=True)
    return int(any(each.fails for each in found))

"""The output of a command: to the terminal, as JSON, and to its folder."""

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from replicax.cli.flags import shown_as
from replicax.errors import ConfigError

RUNS = Path("runs")


def run_folder(run: str | None, default: str, *, new: bool = False) -> Path:
    """Return the folder in runs/ named by `--run`, or by `default` and the time."""
    if run is None:
        run = f"{default}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}", run):
        raise ConfigError(
            f"--run {run!r}; the name of a folder in runs/ has letters, digits and ._+=@- and at "
            "most 100 characters: choose another"
        )
    if new and (RUNS / run).exists():
        raise ConfigError(f"{RUNS / run} exists; this command needs a new folder: name another")
    return RUNS / run


@dataclasses.dataclass(frozen=True)
class JsonOptions:
    """JSON output, for commands that support it."""

    json: Annotated[str | None, shown_as("FILE", "none")] = None
    """Write all figures as JSON to this file; - prints them instead of the table."""

    @property
    def shows_json(self) -> bool:
        """Whether stdout is only for JSON."""
        return self.json == "-"

    @contextlib.contextmanager
    def working(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that shows a live line; other output is kept out of the JSON."""
        folder = Path(self.json or "-").parent
        if self.json is not None and Path(self.json).is_dir():
            raise ConfigError(f"--json {self.json} is a folder; give a file")
        if not folder.is_dir():
            raise ConfigError(f"--json {self.json}: there is no folder {folder}; create it first")
        with standard_error() if self.shows_json else contextlib.nullcontext(), _live() as show:
            yield show

    def say(self, *lines: str) -> None:
        """Print lines, unless stdout is only for JSON."""
        if not self.shows_json:
            for line in lines:
                print(line, flush=True)

    def write_json(self, content: dict[str, Any]) -> None:
        """Print `content` as JSON, or write it to the file, according to the flag."""
        if self.shows_json:
            print(json.dumps(content, indent=2), flush=True)
        elif self.json is not None:
            Path(self.json).write_text(json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def standard_error() -> Iterator[None]:
    """Redirect stdout to stderr, including output of C++ code."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _live() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a live line with the elapsed time if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    started = time.monotonic()
    console = Console(stderr=True, highlight=False)
    status = console.status("", spinner="dots", refresh_per_second=2)

    def show(text: str) -> None:
        status.start()  # not earlier: while it is active, output goes through it
        status.update(f"{text} · {time.monotonic() - started:.0f} s")

    try:
        yield show
    finally:
        status.stop()

"""The output of a command: to the terminal, as JSON, and to its folder."""

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from replicax.cli.flags import shown_as
from replicax.errors import ConfigError
from replicax.text.table import for_stream, printable
from replicax.train.files.places import check_own

RUNS = Path("runs")
_SECONDS_BETWEEN_LINES = 2.0


def show(*lines: str) -> None:
    """Print lines, on a terminal wrapped at its width."""
    for line in lines:
        print(for_stream(printable(line), sys.stdout), flush=True)


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

    json: bool = False
    """Print all figures as JSON instead of the table."""
    json_file: Annotated[Path | None, shown_as("FILE", "none")] = None
    """Also write them to this file, which must be new, or a result that was written before."""

    @contextlib.contextmanager
    def working(self, *, piped: bool = False) -> Iterator["Live"]:
        """Yield a function that shows a live line; other output is kept out of the JSON.

        `piped`: whether it prints lines if stderr is not a terminal.
        """
        if self.json_file is not None:
            flag, folder = f"--json-file {self.json_file}", self.json_file.parent
            if self.json_file.is_dir():
                raise ConfigError(f"{flag} is a folder; give a file")
            if not folder.is_dir():
                raise ConfigError(f"{flag}: there is no folder {folder}; create it first")
            check_own(self.json_file, _BEGINNING)
        with standard_error() if self.json else contextlib.nullcontext():
            live = Live(piped=piped)
            try:
                yield live
            finally:
                live.stop()

    def say(self, *lines: str) -> None:
        """Print lines, unless stdout is only for JSON."""
        if not self.json:
            show(*lines)

    def write_json(self, content: dict[str, Any]) -> None:
        """Print `content` as JSON, and write it to a file, according to the flags."""
        text = json.dumps({**_MARK, **content}, indent=2)
        if self.json:
            print(text, flush=True)
        if self.json_file is not None:
            self.json_file.write_text(f"{text}\n")


_MARK = {"written_by": "replicax"}
_BEGINNING = json.dumps(_MARK, indent=2).removesuffix("\n}")


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


class Live:
    """A live line with the elapsed time on stderr; without a terminal, a line now and then."""

    def __init__(self, *, piped: bool) -> None:
        self._piped, self._began, self._last = piped, time.monotonic(), time.monotonic()
        self._status: Any = None
        if sys.stderr.isatty():
            from rich.console import Console

            console = Console(stderr=True, highlight=False)
            self._status = console.status("", spinner="dots", refresh_per_second=2)

    def __call__(self, text: str) -> None:
        """Show what is being done."""
        now = time.monotonic()
        line = f"{text} · {now - self._began:.0f} s"
        if self._status is not None:
            self._status.start()  # not earlier: while it is active, output goes through it
            self._status.update(line)
        elif self._piped and now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            print(line, file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Print a line on stdout, which stays."""
        self.stop()
        print(for_stream(line, sys.stdout), flush=True)  # in color on a terminal

    def stop(self) -> None:
        """Remove the live line until something is shown."""
        if self._status is not None:
            self._status.stop()

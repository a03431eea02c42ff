"""Where the output of a command goes: the terminal, JSON, its folder."""

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
    """Return the folder in runs/ that `--run` names, or `default` and the time."""
    if run is None:
        run = f"{default}-{time.strftime('%Y%m%d-%H%M%S')}"
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._+=@-]{0,99}", run):
        raise ConfigError(
            f"--run {run!r}; it names a folder in runs/, with letters, digits and ._+=@- and at "
            "most 100 of them: choose another"
        )
    if new and (RUNS / run).exists():
        raise ConfigError(f"{RUNS / run} exists; this makes a folder of its own: name another")
    return RUNS / run


@dataclasses.dataclass(frozen=True)
class JsonOptions:
    """Where the figures go, in the commands that have them as JSON."""

    json: Annotated[str | None, shown_as("FILE", "none")] = None
    """Write all figures as JSON to this file; - prints them instead of the table."""

    @property
    def shows_json(self) -> bool:
        """Whether standard output is for JSON alone."""
        return self.json == "-"

    @contextlib.contextmanager
    def working(self) -> Iterator[Callable[[str], None]]:
        """Yield a function that shows a live line; what else is printed is kept out of JSON."""
        folder = Path(self.json or "-").parent
        if self.json is not None and Path(self.json).is_dir():
            raise ConfigError(f"--json {self.json} is a folder; name a file")
        if not folder.is_dir():
            raise ConfigError(f"--json {self.json}: there is no folder {folder}; make it first")
        with standard_error() if self.shows_json else contextlib.nullcontext(), _live() as show:
            yield show

    def say(self, *lines: str) -> None:
        """Print lines, where standard output is not for JSON alone."""
        if not self.shows_json:
            for line in lines:
                print(line, flush=True)

    def write_json(self, content: dict[str, Any]) -> None:
        """Print `content` as JSON, or write it to the file, as far as the flag asks for it."""
        if self.shows_json:
            print(json.dumps(content, indent=2), flush=True)
        elif self.json is not None:
            Path(self.json).write_text(json.dumps(content, indent=2) + "\n")


@contextlib.contextmanager
def standard_error() -> Iterator[None]:
    """Let what recipes and JAX print while they run go there, C++ included."""
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
    """Yield a function that shows a live line on a terminal, with the time; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    started = time.monotonic()
    console = Console(stderr=True, highlight=False)
    status = console.status("", spinner="dots", refresh_per_second=2)

    def show(text: str) -> None:
        status.start()  # not before: while it lives, what is printed goes through it
        status.update(f"{text} · {time.monotonic() - started:.0f} s")

    try:
        yield show
    finally:
        status.stop()

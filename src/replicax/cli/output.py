"""Where a command's output goes: the terminal, JSON, its folder."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from replicax.errors import ConfigError


def failed(message: str, code: int) -> int:
    """Print why a command failed, in one line; return its exit code."""
    print(f"replicax: {' '.join(message.split())}", file=sys.stderr)
    return code


def new_folder(command: str, recipe: str, run: str | None) -> Path:
    """Return the folder in runs/ that `--run` names, or a name with the time.

    Raises:
        ConfigError: it is there already.
    """
    folder = Path("runs") / (run or f"{command}-{recipe}-{time.strftime('%Y%m%d-%H%M%S')}")
    if folder.exists():
        raise ConfigError(
            f"{folder} exists; a {command} has a folder of its own: choose another name"
        )
    return folder


def check_json(to: str | None) -> None:
    """Raise `ConfigError` where `write_json` would fail, minutes later."""
    if to is None or to == "-":
        return
    if Path(to).is_dir():
        raise ConfigError(f"--json {to} is a folder; name a file")
    if not Path(to).parent.is_dir():
        raise ConfigError(f"--json {to}: there is no folder {Path(to).parent}; make it first")


def write_json(content: dict[str, Any], to: str | None) -> None:
    """Print `content` as JSON where `to` is -, or write it to the file that `to` names."""
    if to == "-":
        print(json.dumps(content, indent=2), flush=True)
    elif to is not None:
        Path(to).write_text(json.dumps(content, indent=2) + "\n")


def with_value(arguments: list[str]) -> list[str]:
    """`--json` alone prints."""
    return [
        "--json=-"
        if word == "--json" and (not arguments[place + 1 :] or arguments[place + 1][:2] == "--")
        else word
        for place, word in enumerate(arguments)
    ]


@contextlib.contextmanager
def standard_output(kept_for_json: bool) -> Iterator[None]:
    """What recipes and JAX print while they run goes to stderr where stdout is for JSON."""
    if not kept_for_json:
        yield
        return
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
def live(shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a live line on a terminal, with the time; nothing elsewhere."""
    if not shown or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    started = time.monotonic()
    console = Console(stderr=True, highlight=False)
    with console.status("", spinner="dots", refresh_per_second=2) as status:
        yield lambda text: status.update(f"{text} · {time.monotonic() - started:.0f} s")

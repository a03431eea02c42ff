"""Processes that a test's engine left running."""

import contextlib
import time
from pathlib import Path

GONE_SECONDS = 5


def leftovers(folder: Path) -> list[str]:
    """Return commands that name `folder` and still run after a few seconds."""
    deadline = time.monotonic() + GONE_SECONDS
    while (found := _commands(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _commands(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in command:
                found.append(command)
    return found

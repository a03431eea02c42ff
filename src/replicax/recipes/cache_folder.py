"""The folder for what Replicax keeps between runs: data, compiled programs, and compiled plans."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path


def cache_folder() -> Path:
    """Return `$REPLICAX_CACHE`, `$XDG_CACHE_HOME/replicax` or `~/.cache/replicax`."""
    if own := os.environ.get("REPLICAX_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(shared) / "replicax"


def prune(paths: Iterable[Path], most_bytes: int) -> None:
    """Remove the files that were read or written first, down to `most_bytes`."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another process prunes, too
            about = path.stat()
            found.append((max(about.st_atime, about.st_mtime), about.st_size, path))
    total = 0
    for _, size, path in sorted(found, reverse=True):
        total += size
        if total > most_bytes:
            path.unlink(missing_ok=True)

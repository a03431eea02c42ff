"""The folder for what Replicax keeps between runs: downloaded data, and compiled plans."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return `$REPLICAX_CACHE`, `$XDG_CACHE_HOME/replicax` or `~/.cache/replicax`."""
    if own := os.environ.get("REPLICAX_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(shared) / "replicax"

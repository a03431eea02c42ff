"""Compiled programs, kept between test runs for all workers and the jobs that they start.

JAX's keys tell versions, flags and devices apart. Its own limit on the size reads every entry's
age at every write, so the folder is not locked; an entry that is read half-written, or whose
writer was killed, is a warning that pyproject.toml ignores, and compiles again.
"""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "build" / "test-programs"
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(FOLDER),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": 0.0,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
}
"""Settings of JAX, as environment variables or in lower case of its configuration."""
_MOST_BYTES = 2 << 30


def prune() -> None:
    """Remove the least recently read programs, down to the limit."""
    entries = [(path, path.stat()) for path in FOLDER.glob("*-cache")]
    total = sum(about.st_size for _, about in entries)
    for path, about in sorted(entries, key=lambda entry: entry[1].st_atime):
        if total <= _MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= about.st_size

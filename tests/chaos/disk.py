"""A small real disk for a run's checkpoints, where this user may mount one."""

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

MEGABYTES = 8
_BLOCK_BYTES = 4096


@cache
def can_mount() -> bool:
    """Return whether a tmpfs can be mounted."""
    if os.geteuid() or not shutil.which("mount") or not shutil.which("umount"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        try:
            with mounted(Path(folder)):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator["Disk"]:
    """A disk of a few megabytes at `folder`, unmounted at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={MEGABYTES}m,mode=755"
    _run("mount", "-t", "tmpfs", "-o", options, "chaos", str(folder))
    try:
        yield Disk(folder)
    finally:
        _run("umount", "--lazy", str(folder))


class Disk:
    """A mounted disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._filler = folder / "filler"

    def fill(self, free_bytes: int) -> None:
        """Leave no more than `free_bytes`."""
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as file:
            while file.write(bytes(_BLOCK_BYTES)) == _BLOCK_BYTES:
                pass
        size = self._filler.stat().st_size
        os.truncate(self._filler, max(size - free_bytes, 0))

    def empty(self) -> None:
        """Make room again."""
        self._filler.unlink(missing_ok=True)

    def lock(self, seconds: float = 5.0) -> bool:
        """Make it read-only; returns False while a file is open for writing."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("mount", "-o", "remount,ro", str(self._folder))
                return True
        return False

    def unlock(self) -> None:
        """Make it writable again."""
        _run("mount", "-o", "remount,rw", str(self._folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)

"""A folder for the programs that the processes of a job compile, gone with its launcher."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "replicax-compiled-"
_OLD_SECONDS = 60.0
"""Age from which a folder that nobody has locked is one that a killed launcher left."""


@contextlib.contextmanager
def compiled_folder() -> Iterator[str]:
    """Yield the path of a new folder that only this user can use; removes it, and those left."""
    _remove_left()
    made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    with made as path, _opened(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield path


def _remove_left() -> None:
    """Remove the folders of launchers that were killed: those that hold no lock any more."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _opened(path) as descriptor:
            about = os.fstat(descriptor)
            if about.st_uid == os.geteuid() and time.time() - about.st_ctime > _OLD_SECONDS:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _opened(folder: str | Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)

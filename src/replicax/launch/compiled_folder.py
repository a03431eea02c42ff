"""A folder for the programs that the processes of a job compile, gone with its launcher."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from replicax.launch.job_spec import JobSpec

_PREFIX = "replicax-compiled-"
_OLD_SECONDS = 60.0
"""Age from which a folder that nobody has locked is one that a killed launcher left."""
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": "",
    "JAX_ENABLE_COMPILATION_CACHE": "true",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}
"""JAX's variables of its cache: all programs, as a start compiles dozens of small ones."""


@contextlib.contextmanager
def compilation_cache(job: JobSpec, env: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield `env`, with a folder for JAX to keep compiled programs in if a part may restart.

    It is one of this launcher's own, so that no program of another machine or job gets there; with
    any of the variables set, the user has decided otherwise.
    """
    if not (job.restarts or job.islands) or set(CACHE) & set(env):
        yield env
        return
    with compiled_folder() as at:
        yield {**env, **CACHE, "JAX_COMPILATION_CACHE_DIR": at}


@contextlib.contextmanager
def compiled_folder() -> Iterator[str]:
    """Yield the path of a new folder that only this user can use; removes it, and those left."""
    _remove_left()
    made = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    with made as path, _opened(path) as descriptor:
        # The system frees a lock however its holder dies, unlike a file with a pid.
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield path


def _remove_left() -> None:
    """Remove the folders of launchers that were killed: those that hold no lock any more."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), _opened(path) as descriptor:
            about = os.fstat(descriptor)
            # A young one may be that of a launcher that has not locked it yet.
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

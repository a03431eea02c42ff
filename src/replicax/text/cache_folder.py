"""The folder for what Replicax keeps between runs: data, compiled programs, and compiled plans."""

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """Return `$REPLICAX_CACHE`, `$XDG_CACHE_HOME/replicax` or `~/.cache/replicax`."""
    if named := os.environ.get("REPLICAX_CACHE"):
        return Path(named)
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(shared) / "replicax"


def make_private(folder: Path) -> None:
    """Create `folder` if it does not exist, and close it to other users.

    Raises:
        OSError: it cannot be made, or others own it or could write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    why = _of_others(about)
    if why:
        raise OSError(errno.EPERM, f"{why}: remove it", str(folder))
    if stat.S_IMODE(about.st_mode) != 0o700:
        folder.chmod(0o700)


def read_entry(path: Path) -> bytes | None:
    """Return what `write_entry` wrote to `path`.

    None if nothing is there, or anything else: damaged, written by others, for another place, or no
    regular file.
    """
    with contextlib.suppress(OSError):
        # Opening a pipe would wait for its writer, and a link leads anywhere.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode) or _of_others(about):
                return None
            digest, content = file.read(_DIGEST), file.read()
            if digest != _digest(path, content):
                return None
            with contextlib.suppress(OSError):  # such as a file system that is read-only
                os.utime(descriptor)  # last use
            return content
    return None


def write_entry(path: Path, content: bytes) -> None:
    """Write the file at `path` whole or not at all, bound to this place by a digest."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_digest(path, content) + content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def prune(paths: Iterable[Path], most_bytes: int) -> None:
    """Remove the files that were read or written first, down to `most_bytes`."""
    files = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # another process prunes, too
            about = path.stat()
            files.append((max(about.st_atime, about.st_mtime), about.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > most_bytes:
            path.unlink(missing_ok=True)


def _digest(path: Path, content: bytes) -> bytes:
    # The names say which program it is, of which compiler, for which kind of device.
    place = f"{path.parent.name}/{path.name}\0".encode()
    return hashlib.sha256(place + content).digest()


def _of_others(about: os.stat_result) -> str:
    """Return why other users may have written a file or folder; empty if they cannot."""
    if about.st_uid != os.geteuid():
        return "it belongs to another user"
    return "other users may write to it" if about.st_mode & 0o022 else ""

"""Where a run is saved: a folder, or a URL of an object store, and what differs between the two.

An object is written whole or not at all, and listed once it is; but there are no folders to make,
sync or rename, and nothing can be appended to. Paths of object stores are `etils.epath`'s, as
Orbax's are; what fails there is raised as `OSError`.
"""

import concurrent.futures
import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from replicax.errors import ConfigError, require

_STORES = ("gs", "s3", "az")
_THREADS = 8
_AT_ONCE_BYTES = 2**24


def place(run_dir: str | os.PathLike[str]) -> Path:
    """Return the path of a folder or of a URL: `"runs/first"`, `"gs://bucket/runs/first"`."""
    scheme, separator, _ = os.fspath(run_dir).partition("://")
    if not separator:
        return Path(run_dir)
    if scheme not in _STORES:
        known = ", ".join(f"{each}://" for each in _STORES)
        raise ConfigError(f"{os.fspath(run_dir)} is in no object store; there are {known}")
    return cast(Path, require("etils.epath", "checkpoints").Path(run_dir))


def is_remote(path: Path) -> bool:
    """Whether `path` is in an object store."""
    return not isinstance(path, Path)


def names(folder: Path) -> list[str]:
    """The names in `folder`, as they are now; none where an object store has none."""
    if not is_remote(folder):
        return os.listdir(folder)
    with contextlib.suppress(FileNotFoundError), _os_errors(folder):
        system = getattr(cast(Any, folder)._backend, "fs", None)
        if system is not None:  # fsspec keeps what it listed, and others have written since
            system(folder).invalidate_cache()
        return [each.name for each in folder.iterdir()]
    return []


def make_folder(folder: Path) -> None:
    """Make `folder` where there are folders, and those above."""
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write the file at `path`: a reader, or a crash, meets all of it or what was there before.

    It is on the disk once this returns.
    """
    if is_remote(path):
        with _os_errors(path):
            path.write_bytes(data)
        return
    beside = path.with_name(f".{path.name}")
    try:
        beside.unlink(missing_ok=True)  # it may be a link to elsewhere
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` on the disk, where a system lets one ask for it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove the file at `path`, if there is one."""
    with _os_errors(path):
        path.unlink(missing_ok=True)


def remove_below(folder: Path) -> None:
    """Remove all that is in a `folder` of an object store."""
    with contextlib.suppress(FileNotFoundError), _os_errors(folder):
        cast(Any, folder).rmtree()


def touch(path: Path) -> None:
    """Change what `read_touched` tells of the file at `path`, which must be there."""
    if is_remote(path):
        with _os_errors(path):
            path.write_bytes(path.read_bytes() + b" ")
    else:
        os.utime(path)  # needs no room on a full disk


def exists(path: Path) -> bool:
    """Whether there is something of that name; a link to nowhere is something."""
    return path.name in names(path.parent) if is_remote(path) else os.path.lexists(path)


def read_bytes(path: Path) -> bytes:
    """The contents of the file at `path`."""
    with _os_errors(path):
        return path.read_bytes()


def read_touched(path: Path) -> tuple[bytes, int]:
    """The contents of the file at `path`, and a number that is another one once it is touched."""
    if is_remote(path):
        data = read_bytes(path)
        return data, len(data)
    with path.open("rb") as file:  # NFS asks its server where a file is opened, and else its cache
        return file.read(), os.fstat(file.fileno()).st_mtime_ns


def copy_files(source: Path, target: Path, paths: Iterable[str]) -> None:
    """Copy the files at `paths`, relative to `source`, from or to an object store."""

    def copy(path: str) -> None:
        make_folder((target / path).parent)
        with (source / path).open("rb") as here, (target / path).open("wb") as there:
            shutil.copyfileobj(here, there, _AT_ONCE_BYTES)

    with _os_errors(target), concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(copy, paths))


@contextlib.contextmanager
def _os_errors(path: Path) -> Iterator[None]:
    """Raise what the many clients of object stores raise as one kind."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise
        kind = type(error).__name__
        number = errno.ENOENT if "NotFound" in kind else errno.EIO  # TensorFlow's, where it is used
        raise OSError(number, f"{kind}: {error}".splitlines()[0], os.fspath(path)) from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `ConfigError` where `path`, or what is in it, cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); make it writable, or choose another"
        ) from error


class Lines:
    """The lines of the file at `path`; an object has them from the next `sync` on."""

    def __init__(self, path: Path) -> None:
        self.path, self._waiting = path, b""

    def append(self, line: str) -> None:
        """Add a line, on a file system at once visible to a reader."""
        data = line.encode() + b"\n"
        if is_remote(self.path):
            self._waiting += data
            return
        with self.path.open("ab") as file:
            file.write(data)

    def sync(self) -> None:
        """Have all lines where they are kept. Where this fails, the next one tries again."""
        if is_remote(self.path):
            if self._waiting:  # nothing can be appended to an object
                before = read_bytes(self.path) if exists(self.path) else b""
                write_whole(self.path, before + self._waiting)
                self._waiting = b""
        elif self.path.exists():
            with self.path.open("ab") as file:
                os.fsync(file.fileno())


def in_folder(folder: Path | None, name: str, hook: str) -> Path:
    """Return `name` in the run's folder, where `hook` writes by default, in process 0."""
    if folder is None:
        raise ConfigError(
            f"{hook} and a run without a folder, where it writes {name}: give the run a run_dir"
        )
    return folder / name


def on_disk(folder: Path | None, given: str | Path | None, name: str, hook: str) -> Path:
    """Return `given`, or `name` in the run's folder where that is None, in process 0."""
    path = in_folder(folder, name, hook) if given is None else place(given)
    if is_remote(path):
        raise ConfigError(
            f"{hook} writes to a file system and {path} is in an object store; give it a local "
            "path of its own"
        )
    return path

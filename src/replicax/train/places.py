"""File operations for run folders, which are local folders or URLs of an object store.

An object is written atomically, and listed once it is written; but there are no folders to create,
sync or rename, and objects cannot be appended to. Object store paths are `etils.epath` paths, as in
Orbax; their errors are raised as `OSError`.
"""

import concurrent.futures
import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from replicax.errors import ConfigError, require

_STORES = ("gs", "s3", "az")
_THREADS = 8
_AT_ONCE_BYTES = 2**24


def place(run_dir: str | os.PathLike[str]) -> Path:
    """Return the path for a folder or URL: `"runs/first"`, `"gs://bucket/runs/first"`."""
    scheme, separator, _ = os.fspath(run_dir).partition("://")
    if not separator:
        return Path(run_dir)
    if scheme not in _STORES:
        known = ", ".join(f"{each}://" for each in _STORES)
        raise ConfigError(f"{os.fspath(run_dir)} is not in a known object store; use {known}")
    return cast(Path, require("etils.epath", "checkpoints").Path(run_dir))


def is_remote(path: Path) -> bool:
    """Whether `path` is in an object store."""
    return not isinstance(path, Path)


def names(folder: Path) -> list[str]:
    """List the names in `folder`, uncached; empty if an object store has no such folder."""
    if not is_remote(folder):
        return os.listdir(folder)
    with contextlib.suppress(FileNotFoundError), _os_errors(folder):
        system = getattr(cast(Any, folder)._backend, "fs", None)
        if system is not None:  # fsspec caches listings, but other processes write too
            system(folder).invalidate_cache()
        return [each.name for each in folder.iterdir()]
    return []


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents; no-op in an object store."""
    if not is_remote(folder):
        folder.mkdir(parents=True, exist_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write the file at `path` atomically: readers see the old or the new contents, never a part.

    The file is on disk when this returns.
    """
    if is_remote(path):
        with _os_errors(path):
            path.write_bytes(data)
        return
    beside = path.with_name(f".{path.name}")
    try:
        beside.unlink(missing_ok=True)  # it may be a link
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
    """Sync the entries of `folder` to disk, if the system supports it."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove the file at `path` if it exists."""
    with _os_errors(path):
        path.unlink(missing_ok=True)


def remove_below(folder: Path) -> None:
    """Remove everything in a `folder` of an object store."""
    with contextlib.suppress(FileNotFoundError), _os_errors(folder):
        cast(Any, folder).rmtree()


def touch(path: Path) -> None:
    """Change the number that `read_touched` returns for the file at `path`, which must exist."""
    if is_remote(path):
        with _os_errors(path):
            path.write_bytes(path.read_bytes() + b" ")
    else:
        os.utime(path)  # works on a full disk


def exists(path: Path) -> bool:
    """Whether `path` exists; a dangling link counts as existing."""
    return path.name in names(path.parent) if is_remote(path) else os.path.lexists(path)


def read_bytes(path: Path) -> bytes:
    """Read the contents of the file at `path`."""
    with _os_errors(path):
        return path.read_bytes()


def read_touched(path: Path) -> tuple[bytes, int]:
    """Read the file at `path`; return its contents and a number that changes with `touch`."""
    if is_remote(path):
        data = read_bytes(path)
        return data, len(data)
    with path.open("rb") as file:  # NFS only revalidates its cache on open
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
    """Convert the errors of object store clients to `OSError`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            raise
        kind = type(error).__name__
        number = errno.ENOENT if "NotFound" in kind else errno.EIO  # TensorFlow's client
        raise OSError(number, f"{kind}: {error}".splitlines()[0], os.fspath(path)) from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise `ConfigError` if `path` or its contents cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); make it writable, or choose another path"
        ) from error


class Lines:
    """An append-only file of lines at `path`; in an object store, lines are written by `sync`."""

    def __init__(self, path: Path) -> None:
        self.path, self._waiting = path, b""

    def append(self, line: str) -> None:
        """Append a line; on a file system, readers see it at once."""
        data = line.encode() + b"\n"
        if is_remote(self.path):
            self._waiting += data
            return
        with self.path.open("ab") as file:
            file.write(data)

    def sync(self) -> None:
        """Write all lines to storage; if this fails, the next `sync` tries again."""
        if is_remote(self.path):
            if self._waiting:  # objects cannot be appended to
                before = read_bytes(self.path) if exists(self.path) else b""
                write_whole(self.path, before + self._waiting)
                self._waiting = b""
        elif self.path.exists():
            with self.path.open("ab") as file:
                os.fsync(file.fileno())


def in_folder(folder: Path | None, name: str, hook: str) -> Path:
    """Return the path of `name` in the run's folder, the default of `hook`; in process 0."""
    if folder is None:
        raise ConfigError(
            f"{hook} writes {name} to the run's folder, but the run has none: pass a run_dir"
        )
    return folder / name


def on_disk(folder: Path | None, given: str | Path | None, name: str, hook: str) -> Path:
    """Return `given`, or if None the path of `name` in the run's folder; in process 0."""
    path = in_folder(folder, name, hook) if given is None else place(given)
    if is_remote(path):
        raise ConfigError(
            f"{hook} writes to a file system, but {path} is in an object store; give it a separate "
            "local path"
        )
    return path


def check_replaceable(path: Path) -> None:
    """Raise `ConfigError` if there is anything at `path` but a regular file."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise ConfigError(
            f"{path} is not a regular file, and nothing else is overwritten: choose another name"
        )

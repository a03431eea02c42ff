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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from replicax.errors import ConfigError, MissingDependencyError, require
from replicax.text.wording import first_line

_STORES = ("gs", "s3", "az")
_THREADS = 8
_AT_ONCE_BYTES = 2**24
_MOST_BYTES = 2**30
"""A larger file is not one of the small files of a run."""


def place(run_dir: str | os.PathLike[str]) -> Path:
    """Return the path for a folder or URL: `"runs/first"`, `"gs://bucket/runs/first"`.

    A folder becomes absolute at once, so that a later `os.chdir` does not move it; `~` is the home
    directory.
    """
    given = os.fspath(run_dir)
    if not given:
        raise ConfigError('the path "" is empty; it must name a folder or a file: name one')
    if "\0" in given:
        raise ConfigError(f"the path {given!a} has a NUL character; choose another")
    try:
        given.encode()
    except UnicodeEncodeError as error:  # it could not be written to any of the run's files
        raise ConfigError(f"the path {given!a} is not Unicode; choose another") from error
    scheme, separator, _ = given.partition("://")
    if not separator:
        try:
            return Path(run_dir).expanduser().absolute()
        except (RuntimeError, OSError) as error:  # no such user, or the working directory is gone
            raise ConfigError(f"{given} has no absolute path: {error}; give one") from error
    if scheme not in _STORES:
        known = ", ".join(f"{each}://" for each in _STORES)
        raise ConfigError(f"{os.fspath(run_dir)} is not in a known object store; use {known}")
    return cast(Path, require("etils.epath", "checkpoints").Path(run_dir))


def shown(path: Path) -> str:
    """Return `path` for a message: relative if it lies in the working directory."""
    with contextlib.suppress(ValueError, OSError):
        return os.fspath(path.relative_to(Path.cwd()))
    return os.fspath(path)


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
    if is_remote(folder):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        if not os.path.islink(at := error.filename) or os.path.exists(at):
            raise
        text = f"a link to {os.readlink(at)}, which does not exist"
        raise FileNotFoundError(errno.ENOENT, text, at) from error


def write_whole(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write the file at `path` atomically: readers see the old or the new contents, never a part.

    With `sync` the file is on disk when this returns.
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
            if sync:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
        if sync:
            sync_folder(path.parent)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def refuse_links(folders: Iterable[Path]) -> None:
    """Raise `ConfigError` if one of the folders is a link: what it leads to may be anyone's."""
    for folder in folders:
        if not is_remote(folder) and folder.is_symlink():
            raise ConfigError(
                f"{folder} is a link, which is not followed within a run's folder: move what it "
                "leads to there, or link the whole folder"
            )


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
    """Read the contents of the file at `path`; see `read_touched`."""
    return read_touched(path)[0]


def read_end(path: Path, most: int) -> bytes:
    """Read the last `most` bytes of the local file at `path`, which must be a regular file."""
    with _regular(path, os.O_RDONLY) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        data: bytes = file.read()
        return data


def read_touched(path: Path) -> tuple[bytes, int]:
    """Read the file at `path`; return its contents and a number that changes with `touch`.

    Raises:
        OSError: it is not a regular file (reading a pipe could wait forever), or too large.
    """
    if is_remote(path):
        with _os_errors(path):
            data = path.read_bytes()
        return data, len(data)
    # NFS only revalidates its cache on open. Opening a pipe would wait for its writer.
    with _regular(path, os.O_RDONLY) as file:
        status = os.fstat(file.fileno())
        if status.st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read(), status.st_mtime_ns


def _regular(path: Path, flags: int) -> Any:
    """Open the regular file at `path`, unbuffered, without ever waiting or following a link."""
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOFOLLOW"):
        flags |= getattr(os, name, 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "Not a regular file, but a link", str(path)) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        text = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "Not a regular file"
        raise OSError(errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL, text, str(path))
    return open(descriptor, "ab" if flags & os.O_APPEND else "rb", buffering=0)


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
    except ImportError as error:
        raise MissingDependencyError(
            f"{path}: the client of this object store is not installed ({first_line(error)})"
        ) from error
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
        where = error.filename2 or error.filename or path
        raise ConfigError(
            f"{where} cannot be written ({error.strerror}); make it writable, remove it, or choose "
            "another path"
        ) from error


class Lines:
    """An append-only file of lines at `path`; in an object store, lines are written by `sync`.

    An error of the file system ends nothing: the lines are kept, and written by the next call that
    can. `fault` tells it once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting, self._anew = b"", False  # anew: they replace the file
        self._failing = self._told = ""
        self.may_write: Callable[[], bool] = lambda: True
        """Whether no other process has replaced the file, asked once it is open."""

    @property
    def fault(self) -> str | None:
        """Why lines are not written yet, unless that was returned before."""
        told, self._told = self._told, self._failing
        return None if told else self.unwritten

    @property
    def unwritten(self) -> str | None:
        """Why lines are not written yet."""
        return f"{self.path}: {self._failing}" if self._failing else None

    def contents(self) -> bytes:
        """Return all lines, including those that are not written yet."""
        before = b"" if self._anew or not exists(self.path) else read_bytes(self.path)
        return before + self._waiting

    def append(self, line: str) -> None:
        """Append a line; on a file system, readers see it at once."""
        self._waiting += line.encode() + b"\n"
        if not is_remote(self.path):
            self._write(sync=False)

    def replace(self, lines: bytes) -> None:
        """Replace the contents of the file by `lines`."""
        self._waiting, self._anew = lines, True
        self._write(sync=True)

    def sync(self) -> None:
        """Write all lines to storage."""
        self._write(sync=True)

    def _write(self, *, sync: bool) -> None:
        try:
            if self._anew or (is_remote(self.path) and self._waiting):
                write_whole(self.path, self.contents())
                self._waiting, self._anew = b"", False
            elif not is_remote(self.path) and (self._waiting or self.path.exists()):
                with _regular(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT) as file:
                    # Not before it is open: who replaces it from here on replaces these lines, too.
                    if not self.may_write():
                        self._waiting = b""
                    while self._waiting:  # a disk that fills up takes a part of a line
                        self._waiting = self._waiting[file.write(self._waiting) :]
                    if sync:
                        os.fsync(file.fileno())
            self._failing = ""
        except OSError as error:
            self._failing = error.strerror or type(error).__name__


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


def check_own(path: Path, beginning: str) -> None:
    """Raise `ConfigError` if the file at `path` is none that Replicax wrote, but someone else's.

    Its own begins with `beginning`, or a part of that, as one that was cut off.
    """
    if not path.is_file():
        return
    try:
        with path.open("rb") as file:
            begun = file.read(len(beginning))
    except OSError:
        begun = None
    if begun is None or not beginning.encode().startswith(begun):
        raise ConfigError(
            f"{path} would be replaced, but cannot be read, or was not written by Replicax: name "
            "another"
        )


def check_replaceable(path: Path) -> None:
    """Raise `ConfigError` if there is anything at `path` but a regular file."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise ConfigError(
            f"{path} is not a regular file, and nothing else is overwritten: choose another name"
        )

"""The files of a run's leases, in the folder `lease` of the run.

00000004.json      who start 4 of the run is: appears whole, locked, and only once
00000004.released  start 4 has given the run back
"""

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import secrets
import stat
import sys
from pathlib import Path

from replicax.errors import ConfigError
from replicax.train.holder import LONGEST_BYTES, Holder, parse_holder

MOST_KEPT = 8
"""Starts whose files are kept."""

_STRAY_SECONDS = 3600.0
_LAST_TOKEN = 10**12 - 1
_NUMBERED = re.compile(r"([0-9]{8,12})\.(json|released)")
_UNFINISHED = re.compile(r"\.taking-[0-9a-f]{16}")
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)

Key = tuple[int, int, int]
"""Process, device and inode."""

# Lease files that this process has open and locked. It must not open them again: POSIX drops a
# process's locks on a file as soon as it closes any descriptor of that file.
_held: dict[Key, Holder] = {}


@dataclasses.dataclass(frozen=True)
class Starts:
    """What the names in `lease` tell."""

    newest: int
    """The highest token, 0 for none."""
    released: bool
    """Whether that start has given the run back."""


def starts(folder: Path) -> Starts:
    """Those of the run in `folder`; names that a start would not have chosen are passed over."""
    numbers = [number for name in os.listdir(folder / "lease") if (number := _number(name))]
    newest, kind = max(numbers, default=(0, ""))  # "released" comes after "json"
    return Starts(newest, kind == "released")


def _number(name: str) -> tuple[int, str] | None:
    match = _NUMBERED.fullmatch(name)
    if match is None or f"{int(match[1]):08d}" != match[1]:
        return None
    return int(match[1]), match[2]


def lease_path(folder: Path, token: int) -> Path:
    """The file of start `token`."""
    return folder / "lease" / f"{token:08d}.json"


def key_of(status: os.stat_result) -> Key:
    """What tells a file from all others for as long as this process has it open."""
    return os.getpid(), status.st_dev, status.st_ino


@dataclasses.dataclass(frozen=True)
class Seen:
    """A lease file at one moment."""

    holder: Holder | None
    """None where it does not tell."""
    is_locked: bool | None
    """None where the file system does not tell."""
    touched_ns: int
    """By the file system's clock."""


def look(folder: Path, token: int) -> Seen:
    """At the lease file of start `token`. Whatever lies there is read with suspicion.

    Raises:
        FileNotFoundError: there is none.
    """
    path = lease_path(folder, token)
    status = os.lstat(path)
    own = _held.get(key_of(status))
    if own is not None:
        return Seen(own, True, status.st_mtime_ns)
    unknown = Seen(None, None, status.st_mtime_ns)
    try:
        # Opened at every look: NFS then asks its server instead of its cache.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return unknown
    try:
        holder = parse_holder(os.read(descriptor, LONGEST_BYTES + 1), token)
        return Seen(holder, _is_locked(descriptor), os.fstat(descriptor).st_mtime_ns)
    except OSError:
        return unknown
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool | None:
    try:
        # Shared, so that two who look do not take each other for the holder.
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EACCES, errno.EAGAIN) else None
    return False


def make_folder(folder: Path) -> None:
    """Make `folder` and `lease` in it, where they are missing.

    Raises:
        ConfigError: `lease` is a link or a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lease"
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise ConfigError(f"{path} is no folder, as the lease of a run is: remove it")


def publish(folder: Path, token: int) -> int | None:
    """Make the file of start `token`, which is this process, and remove those of long ago.

    Returns:
        Its descriptor, whose lock ends with the process; None where another start was faster.

    Raises:
        ConfigError: no number is left.
    """
    if token > _LAST_TOKEN:
        raise ConfigError(
            f"{folder / 'lease'} counts {token - 1} starts and no further: remove its last file"
        )
    path = lease_path(folder, token)
    descriptor = _linked(path, Holder.this_process(token))
    if descriptor is None:
        return None
    try:
        if starts(folder).newest == token:
            _tidy(folder, token, os.fstat(descriptor).st_mtime)
            return descriptor
    except BaseException:
        _withdraw(path, descriptor)
        raise
    _withdraw(path, descriptor)  # so late that this number had come, gone, and been removed
    return None


def close(descriptor: int) -> None:
    """Close a file that `publish` has made, which unlocks it."""
    with contextlib.suppress(OSError):
        key = key_of(os.fstat(descriptor))
        try:
            os.close(descriptor)
        finally:
            _held.pop(key, None)


def _withdraw(path: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    close(descriptor)


def _linked(path: Path, holder: Holder) -> int | None:
    """`_written`, so that nobody meets half a file; None where there is one."""
    beside = path.with_name(f".taking-{secrets.token_hex(8)}")
    try:
        descriptor = _written(beside, holder)
        try:
            os.link(beside, path)
            return descriptor
        except FileExistsError:
            close(descriptor)
            return None
        except OSError as error:
            close(descriptor)
            if error.errno not in _NO_HARD_LINKS:
                raise
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
    try:
        return _written(path, holder)  # who meets half of it knows no host, and then sees it change
    except FileExistsError:
        return None


def _written(path: Path, holder: Holder) -> int:
    """A new file with `holder`, locked; its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    try:
        _held[key_of(os.fstat(descriptor))] = holder
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            say(f"{path.parent} has no locks ({error.strerror}): after a kill the next start waits")
        with open(descriptor, "wb", closefd=False) as file:
            file.write(holder.to_json())
        os.fsync(descriptor)
    except BaseException:
        _withdraw(path, descriptor)
        raise
    return descriptor


def _tidy(folder: Path, token: int, now: float) -> None:
    """Remove what earlier starts left; `now` is by the file system's clock."""
    for entry in (folder / "lease").iterdir():
        with contextlib.suppress(OSError):
            if number := _number(entry.name):
                is_old = number[0] <= token - MOST_KEPT
            else:
                is_old = (
                    _UNFINISHED.fullmatch(entry.name) is not None
                    and now - entry.lstat().st_mtime > _STRAY_SECONDS
                )
            if is_old:
                entry.unlink()


def say(line: str) -> None:
    """Print a line to stderr, where there is one."""
    with contextlib.suppress(OSError, ValueError):
        print(f"replicax: {line}", file=sys.stderr, flush=True)

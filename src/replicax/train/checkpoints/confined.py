"""Files of a folder, opened so that no path and no link leads out of it."""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from replicax.errors import CheckpointError
from replicax.train.checkpoints.strict_json import shown

MOST_PARTS = 16
"""Folders a file may be deep, itself counted."""

# Not blocking: a pipe in a file's place would wait for a writer. Regular files are read as ever.
_FLAGS = os.O_RDONLY
for _name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):
    _FLAGS |= getattr(os, _name, 0)  # Windows has none of them


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """A descriptor of `folder`, closed at the end.

    Raises:
        CheckpointError: it is no folder, or a link to one, or cannot be opened.
    """
    try:
        root = os.open(folder, _FLAGS | os.O_DIRECTORY)
    except OSError as error:
        raise _failure(folder.name, "folder", error) from error
    try:
        yield root
    finally:
        os.close(root)


def open_file(root: int, path: str) -> int:
    """A descriptor of the regular file at `path`, relative to the folder that `root` describes.

    Raises:
        CheckpointError: it is not there, no regular file, behind a link, or cannot be opened.
    """
    *folders, name = path.split("/")
    parent = _open_below(root, folders)
    try:
        file = os.open(name, _FLAGS, dir_fd=parent)
    except OSError as error:
        raise _failure(path, "regular file", error) from error
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{shown(path)} is no regular file")
    return file


def read(root: int, path: str, most_bytes: int) -> bytes:
    """The contents of the file at `path`.

    Raises:
        CheckpointError: as `open_file`, or it is larger than `most_bytes`.
    """
    with os.fdopen(open_file(root, path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise CheckpointError(
                f"{shown(path)} has {size} bytes; at most {most_bytes} are allowed"
            )
        try:
            return file.read(most_bytes)
        except OSError as error:
            raise _failure(path, "regular file", error) from error


def sizes(root: int) -> Iterator[tuple[str, int]]:
    """Path and bytes of each file anywhere below, as they come.

    Raises:
        CheckpointError: there is something else than folders and regular files, or it cannot be
            listed.
    """
    waiting: list[list[str]] = [[]]
    while waiting:
        folders = waiting.pop()
        for name, status in _listed(root, folders):
            path = "/".join([*folders, name])
            if stat.S_ISREG(status.st_mode):
                yield path, status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                raise CheckpointError(f"{shown(path)} is no regular file")
            elif len(folders) + 2 > MOST_PARTS:
                raise CheckpointError(f"{shown(path)} is a folder more than {MOST_PARTS - 1} deep")
            else:
                waiting.append([*folders, name])


def _listed(root: int, folders: list[str]) -> list[tuple[str, os.stat_result]]:
    folder = _open_below(root, folders)
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except OSError as error:
        raise _failure("/".join(folders) or "the folder", "folder", error) from error
    finally:
        os.close(folder)


def _open_below(root: int, folders: list[str]) -> int:
    """Part by part, as `O_NOFOLLOW` looks only at the last."""
    here = os.open(".", _FLAGS | os.O_DIRECTORY, dir_fd=root)
    for depth, name in enumerate(folders, start=1):
        try:
            below = os.open(name, _FLAGS | os.O_DIRECTORY, dir_fd=here)
        except OSError as error:
            raise _failure("/".join(folders[:depth]), "folder", error) from error
        finally:
            os.close(here)
        here = below
    return here


def _failure(path: str, kind: str, error: OSError) -> CheckpointError:
    if error.errno == errno.ENOENT:
        return CheckpointError(f"{shown(path)} is missing")
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
        return CheckpointError(f"{shown(path)} is no {kind}")
    return CheckpointError(f"{shown(path)} cannot be read ({error.strerror or error})")

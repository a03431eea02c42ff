"""How a checkpoint gets its place, whole or not at all: by a rename, or by its manifest.

On a file system a folder is written beside, and put in its place by one rename. In an object store
each process uploads what it has written into a folder of its own; the manifest comes last, and a
folder without one is no checkpoint.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

from replicax.errors import CheckpointError, ConfigError
from replicax.train.checkpoints.manifest import MANIFEST, read_manifest
from replicax.train.places import (
    copy_files,
    names,
    read_touched,
    remove,
    remove_below,
    sync_folder,
    write_whole,
)

_LEFTOVERS = (".saving-", ".retired-")
_REFUSED = f"refused-{MANIFEST}"
_ENDED = {MANIFEST, _REFUSED}


class Folders:
    """The folders in `folder`, on a file system that all processes see."""

    is_shared = True
    """Whether all processes write into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        """Names of what may be a checkpoint."""
        return names(self.folder) if self.folder.is_dir() else []

    def temporary(self, step: int, token: int, number: int) -> Path:
        """Where this process writes; no other start has this path."""
        return self.folder / f".saving-{step:09d}-{token}-{number}"

    def upload(self, temporary: Path, files: Iterable[str]) -> None:
        """Have the `files` that this process has written where all are."""

    def commit(self, temporary: Path, step: int) -> None:
        """Put what was written in its place, beside what is there of the same step."""
        path = first = self.folder / f"step-{step:09d}"
        again = 1
        while path.exists():
            again += 1
            path = first.with_name(f"{first.name}.{again}")
        os.rename(temporary, path)
        sync_folder(self.folder)

    def discard(self, leftover: Path) -> None:
        """Delete what is no checkpoint, as far as that can be done."""
        shutil.rmtree(leftover, ignore_errors=True)

    def delete(self, path: Path) -> None:
        """Delete a checkpoint."""
        # Killed in the middle of it, half a checkpoint must not be in a whole one's place.
        retired = path.with_name(f".retired-{path.name}-{os.getpid()}")
        os.rename(path, retired)
        self.discard(retired)

    def set_aside(self, path: Path) -> str:
        """Have what is at `path` be no checkpoint any more; the name that it has then."""
        number = 1
        while (aside := path.with_name(f"refused-{path.name}-{number}")).exists():
            number += 1
        os.rename(path, aside)
        return aside.name

    def clean(self) -> None:
        """Delete what starts that were killed have left half done."""
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise ConfigError(f"{self.folder} is no folder; the checkpoints go there: remove it")
        for name in self.names():
            if name.startswith(_LEFTOVERS):
                self.discard(self.folder / name)

    def local(self, path: Path) -> Path:
        """Where the checkpoint at `path` can be read by any library."""
        if path.is_symlink():
            raise CheckpointError("it is a symbolic link")
        return path


class RemoteFolders(Folders):
    """The folders in `folder`, in an object store."""

    is_shared = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._copies: dict[str, Path] = {}

    def names(self) -> list[str]:
        return [name for name in names(self.folder) if MANIFEST in names(self.folder / name)]

    def temporary(self, step: int, token: int, number: int) -> Path:
        """A folder of this process, with the name that the checkpoint will have."""
        beside = Path(tempfile.mkdtemp(prefix="replicax-"))
        return beside / f"step-{step:09d}.{token * 10**6 + number}"

    def upload(self, temporary: Path, files: Iterable[str]) -> None:
        copy_files(temporary, self.folder / temporary.name, files)

    def commit(self, temporary: Path, step: int) -> None:
        manifest = (temporary / MANIFEST).read_bytes()
        write_whole(self.folder / temporary.name / MANIFEST, manifest)

    def discard(self, leftover: Path) -> None:
        """Delete this process's own copy; what was uploaded is what `clean` finds."""
        shutil.rmtree(leftover.parent, ignore_errors=True)

    def delete(self, path: Path) -> None:
        remove(path / MANIFEST)  # first: half of it must be no checkpoint
        remove_below(path)

    def set_aside(self, path: Path) -> str:
        write_whole(path / _REFUSED, read_touched(path / MANIFEST)[0])
        remove(path / MANIFEST)
        return f"{path.name}/{_REFUSED}"

    def clean(self) -> None:
        for name in names(self.folder):
            if name.startswith("step-") and not _ENDED & set(names(self.folder / name)):
                remove_below(self.folder / name)

    def local(self, path: Path) -> Path:
        """A copy that was downloaded, and goes with this object: of all that the manifest names."""
        if path.name in self._copies:
            return self._copies[path.name]
        copy = Path(tempfile.mkdtemp(prefix="replicax-")).resolve()
        weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
        try:
            copy_files(path, copy, [MANIFEST])
            files = read_manifest(copy).files
            for each in files:
                if not (copy / each).resolve().is_relative_to(copy):
                    raise CheckpointError(f"{each} is a path out of the checkpoint's folder")
            copy_files(path, copy, files)
        except FileNotFoundError as error:
            raise CheckpointError("a file that its manifest names is missing") from error
        self._copies[path.name] = copy
        return copy

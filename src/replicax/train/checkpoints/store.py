"""A run's checkpoints: which there are, which is good, which are kept.

step-000000120/       whole, and in its place by one rename
step-000000120.2/     the same, saved once more: after its evaluation, say
.saving-000000160-3-7 being written, or left by a start that was killed
.retired-...          being deleted
refused-...           a checkpoint that was not what its manifest says; for a person to look at

In an object store each process uploads what it has written into a folder of its own; the manifest
comes last, and a folder without one is no checkpoint.

Orbax and tensorstore believe what they find: a chunk that is missing is read as zeros, a flipped
bit as it is. Who can write into a run's folder is trusted as the code is; its disk is not.
"""

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from replicax.errors import CheckpointError, ConfigError, check_at_least
from replicax.train.checkpoints.manifest import (
    MANIFEST,
    ArrayEntry,
    Manifest,
    check_files,
    read_manifest,
)
from replicax.train.places import (
    copy_files,
    is_remote,
    names,
    read_touched,
    remove,
    remove_below,
    sync_folder,
    write_whole,
)

STATE = "state"
"""The folder of the arrays, in a checkpoint's."""
_MOST_NAMED = 3
_LEFTOVERS = (".saving-", ".retired-")
_REFUSED = f"refused-{MANIFEST}"
_ENDED = {MANIFEST, _REFUSED}
_COMMITTED = re.compile(r"step-(\d{9,18})(?:\.([2-9]|[1-9]\d{1,17}))?")
CHECKPOINTS = "checkpoints"
"""The folder of them, in a run's."""
LOSSES = "losses"
"""The window of losses that spikes are compared with."""


def verify(folder: Path, manifest: Manifest) -> None:
    """Check the checkpoint in `folder`: names and sizes first, then every byte."""
    check_files(folder, manifest.files)
    chunks = dict.fromkeys(manifest.arrays, 0)
    for path, file in manifest.files.items():
        array, _, chunk = path.removeprefix(f"{STATE}/").rpartition("/")
        if array in chunks and chunk != ".zarray":
            chunks[array] += file.bytes
    for name, entry in manifest.arrays.items():
        if chunks[name] < entry.nbytes:
            raise CheckpointError(
                f"{name} has {chunks[name]} bytes, and {entry} takes {entry.nbytes}"
            )


def check_arrays(arrays: Mapping[str, ArrayEntry], wanted: Mapping[str, ArrayEntry]) -> None:
    """Raise `CheckpointError` where a checkpoint's arrays are not those of the run."""
    differences = list(_differences(arrays, wanted))
    if not differences:
        return
    more = len(differences) - _MOST_NAMED
    named = "; ".join(differences[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
    fix = "the model, the optimizer or the precision is another; go back to theirs"
    if all(each.startswith("reduction") for each in differences):
        fix = "each replica has its own; go back to as many devices, and to this reduction"
    raise CheckpointError(f"{named}: {fix}, or start a new run")


def _differences(
    arrays: Mapping[str, ArrayEntry], wanted: Mapping[str, ArrayEntry]
) -> Iterator[str]:
    for name in sorted(arrays.keys() | wanted.keys()):
        if name not in wanted:
            yield f"{name} is in it and not in this run"
        elif name not in arrays:
            yield f"{name} is in this run and not in it"
        elif arrays[name] != wanted[name]:
            yield f"{name} is {arrays[name]} in it and {wanted[name]} in this run"


class Store:
    """The checkpoints in `folder`, on a file system that all processes see, or an object store.

    Only process 0 of a run's holder changes anything there, but for arrays being written.
    """

    is_shared = True
    """Whether all processes write into one folder; else each uploads what it has written."""

    def __new__(cls, folder: Path, *_: Any, **__: Any) -> "Store":
        """Choose the kind by where `folder` is, as `Path` does by the system."""
        return super().__new__(RemoteStore if is_remote(folder) else cls)

    def __init__(self, folder: Path, keep: int, keep_every: int | None) -> None:
        self.folder = folder
        self._keep, self._keep_every = keep, keep_every
        self._verified: Path | None = None
        check_at_least("keep", keep, 1)
        check_at_least("keep_every", keep_every, 1)

    def paths(self) -> list[tuple[int, Path]]:
        """Steps and folders of all that are in their place, the oldest first."""
        found = filter(None, map(_COMMITTED.fullmatch, self._names()))
        ordered = sorted((int(match[1]), int(match[2] or 1), match[0]) for match in found)
        return [(step, self.folder / name) for step, _, name in ordered]

    def newest_good(
        self, wanted: Mapping[str, ArrayEntry], refuse: Callable[[str], None]
    ) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that is what its manifest says; None where there is none.

        Those that are not are set aside.
        """
        for step, path in reversed(self.paths()):
            try:
                manifest = self.read_placed(step, path)
                self.verify(path, manifest)
            except CheckpointError as error:
                refuse(f"refused step {step:,}: {error} (set aside as {self._aside(path)})")
                continue
            try:
                check_arrays(manifest.arrays, wanted)
            except CheckpointError as error:
                what = "is of another run"
                if (LOSSES in wanted) != (LOSSES in manifest.arrays):
                    what = "was saved with another Guard(spikes=...), which cannot change in a run"
                raise ConfigError(f"{path} {what}: {error}") from error
            return path, manifest
        return None

    def read_placed(self, step: int, path: Path) -> Manifest:
        """The manifest of a checkpoint in the place of `step`; its files are not looked at."""
        manifest = read_manifest(self._copy(path))
        if manifest.position.step != step:
            raise CheckpointError(f"it holds step {manifest.position.step}")
        return manifest

    def verify(self, path: Path, manifest: Manifest) -> None:
        verify(self._copy(path), manifest)
        self._verified = path

    def local(self, path: Path) -> Path:
        """Where the checkpoint at `path` is to be read: there, or in a copy that goes with this."""
        try:
            local = self._copy(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
        if local != path and path != self._verified:  # each process has a copy of its own
            self.verify(path, read_manifest(local))
        return local

    def retire(self, pinned: Collection[int] = ()) -> None:
        """Delete those that need not be kept; never the newest, nor those of the steps `pinned`."""
        newest = dict(self.paths())  # of each step the last
        kept = [step for step in newest if self._keep_every and not step % self._keep_every]
        kept += pinned
        kept += list(newest)[-self._keep :]
        for step, path in self.paths():
            if step not in kept or newest[step] != path:
                self._delete(path)

    def temporary(self, step: int, token: int, number: int) -> Path:
        """Where this process writes that of `step`: no other start or save has this path."""
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
        shutil.rmtree(leftover, ignore_errors=True)

    def clean(self) -> None:
        """Delete what starts that were killed have left half done."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is no folder; the checkpoints go there: remove it")
        for name in self._names():
            if name.startswith(_LEFTOVERS):
                self.discard(self.folder / name)

    def _names(self) -> list[str]:
        return names(self.folder) if self.folder.is_dir() else []

    def _copy(self, path: Path) -> Path:
        """Where the checkpoint at `path` can be read by any library."""
        return path

    def _delete(self, path: Path) -> None:
        # Killed in the middle of it, half a checkpoint must not be in a whole one's place.
        retired = path.with_name(f".retired-{path.name}-{os.getpid()}")
        os.rename(path, retired)
        self.discard(retired)

    def _set_aside(self, path: Path) -> str:
        """Have what is at `path` be no checkpoint any more; the name that it has then."""
        number = 1
        while (aside := path.with_name(f"refused-{path.name}-{number}")).exists():
            number += 1
        os.rename(path, aside)
        return aside.name

    def _aside(self, path: Path) -> str:
        try:
            return self._set_aside(path)
        except OSError as error:
            raise CheckpointError(
                f"{path} is not to be trusted and cannot be set aside ({error.strerror}); make its "
                "folder writable"
            ) from error


class RemoteStore(Store):
    """The checkpoints in a folder of an object store."""

    is_shared = False

    def __init__(self, folder: Path, keep: int, keep_every: int | None) -> None:
        super().__init__(folder, keep, keep_every)
        self._copies: dict[str, Path] = {}

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

    def clean(self) -> None:
        for name in names(self.folder):
            if name.startswith("step-") and not _ENDED & set(names(self.folder / name)):
                remove_below(self.folder / name)

    def _names(self) -> list[str]:
        return [name for name in names(self.folder) if MANIFEST in names(self.folder / name)]

    def _copy(self, path: Path) -> Path:
        """A copy that was downloaded, and goes with this object: of all that the manifest names."""
        if path.name in self._copies:
            return self._copies[path.name]
        copy = Path(tempfile.mkdtemp(prefix="replicax-"))
        weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
        try:
            copy_files(path, copy, [MANIFEST])
            copy_files(path, copy, read_manifest(copy).files)
        except FileNotFoundError as error:
            raise CheckpointError("a file that its manifest names is missing") from error
        self._copies[path.name] = copy
        return copy

    def _delete(self, path: Path) -> None:
        remove(path / MANIFEST)  # first: half of it must be no checkpoint
        remove_below(path)

    def _set_aside(self, path: Path) -> str:
        write_whole(path / _REFUSED, read_touched(path / MANIFEST)[0])
        remove(path / MANIFEST)
        return f"{path.name}/{_REFUSED}"

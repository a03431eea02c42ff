"""A run's checkpoints: list, verify, commit and delete them.

120/                  complete, committed by one rename; the name that Orbax gives to step 120
.saving-000000160-3-7 being written, or left behind by a killed process
.replaced-120         the same step saved before, such as before its evaluation, being replaced
.retired-...          being deleted
step-000000120.2/     a step as named in an object store
refused-...           a checkpoint that failed verification, kept for inspection

In an object store each process uploads the files it wrote to a separate folder; the manifest is
uploaded last, and a folder without a manifest is not a checkpoint.

Orbax and tensorstore do not verify their input: a missing chunk is read as zeros, and a flipped bit
goes unnoticed. Anyone who can write to a run's folder is trusted like the code; the disk is not.
"""

import contextlib
import math
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from replicax.errors import CheckpointError, ConfigError
from replicax.train.checkpoints.arrays import ITEM
from replicax.train.checkpoints.manifest import (
    MANIFEST,
    ArrayEntry,
    Manifest,
    check_files,
    read_manifest,
)
from replicax.train.checkpoints.with_orbax import missing_chunks
from replicax.train.files.places import (
    copy_files,
    is_remote,
    names,
    read_touched,
    remove,
    remove_below,
    sync_folder,
    write_whole,
)

_MOST_NAMED = 3
_REPLACED = ".replaced-"
_LEFTOVERS = (".saving-", ".retired-", _REPLACED)
_UNFINISHED = re.compile(r"\.saving-(?P<step>[0-9]{9,18})-")
_REFUSED = f"refused-{MANIFEST}"
_ENDED = {MANIFEST, _REFUSED}
_COMMITTED = re.compile(r"(?P<step>0|[1-9][0-9]{0,17})")
_OTHERWISE = re.compile(r"step-(?P<step>[0-9]{9,18})(?:\.(?P<again>[2-9]|[1-9][0-9]{1,17}))?")
CHECKPOINTS = "checkpoints"
"""The checkpoints' folder within a run's folder."""
LOSSES = "losses"
"""The window of recent losses for spike detection."""


def verify_checkpoint(folder: Path, manifest: Manifest) -> None:
    """Check the checkpoint in `folder`: names and sizes first, then every byte."""
    check_files(folder, manifest.files)
    shapes = {name: each.shape for name, each in manifest.arrays.items() if each.nbytes}
    for fault in missing_chunks(folder / ITEM, shapes):
        raise CheckpointError(fault)


def check_arrays(arrays: Mapping[str, ArrayEntry], wanted: Mapping[str, ArrayEntry]) -> None:
    """Raise `CheckpointError` if a checkpoint's arrays do not match the run's."""
    differences = list(array_differences(arrays, wanted, "this run"))
    if not differences:
        return
    more = len(differences) - _MOST_NAMED
    named = "; ".join(differences[:_MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
    fix = "the model, optimizer or precision has changed; restore the original"
    if all(each.startswith(("reduction", "islands")) for each in differences):
        fix = "this state is per replica; use the original number of devices and reduction"
    raise CheckpointError(f"{named}: {fix}, or start a new run")


def array_differences(
    arrays: Mapping[str, ArrayEntry], wanted: Mapping[str, ArrayEntry], here: str
) -> Iterator[str]:
    """Yield how a checkpoint's arrays differ from those `wanted` here."""
    for name in sorted(arrays.keys() | wanted.keys()):
        if name not in wanted:
            yield f"{name} is in the checkpoint but not in {here}"
        elif name not in arrays:
            yield f"{name} is in {here} but not in the checkpoint"
        elif arrays[name] != wanted[name]:
            yield f"{name} is {arrays[name]} in the checkpoint but {wanted[name]} in {here}"


class Store:
    """The checkpoints in `folder`, on a file system shared by all processes or an object store.

    Only process 0 of the job that holds the lease modifies the folder, except for writing arrays.
    """

    shows_begun = True
    """Whether a save that was killed leaves something, whenever that was."""

    is_shared = True
    """Whether all processes write into one folder; if not, each uploads its own files."""

    def __new__(cls, folder: Path, *_: Any, **__: Any) -> "Store":
        """Choose the subclass by the location of `folder`."""
        return super().__new__(RemoteStore if is_remote(folder) else cls)

    def __init__(self, folder: Path, keep: int, keep_every: int | None) -> None:
        self.folder = folder
        self._keep, self._keep_every = keep, keep_every
        self._verified: Path | None = None

    def paths(self) -> list[tuple[int, Path]]:
        """Return the steps and folders of all committed checkpoints, oldest first."""
        committed = []
        for name in self._names():
            if match := _COMMITTED.fullmatch(name):
                committed.append((int(match["step"]), math.inf, name))
            elif match := _OTHERWISE.fullmatch(name):
                committed.append((int(match["step"]), int(match["again"] or 1), name))
        return [(step, self.folder / name) for step, _, name in sorted(committed)]

    def newest_good(
        self, wanted: Mapping[str, ArrayEntry], refuse: Callable[[str], None]
    ) -> tuple[Path, Manifest] | None:
        """Return the newest checkpoint that passes verification, or None if there is none.

        Those that fail are set aside.
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
                what = "belongs to a different run"
                if (LOSSES in wanted) != (LOSSES in manifest.arrays):
                    what = "was saved with another Guard(skip_spikes=...), fixed for a run"
                raise ConfigError(f"{path} {what}: {error}") from error
            return path, manifest
        return None

    def read_placed(self, step: int, path: Path) -> Manifest:
        """Return the manifest of the checkpoint of `step` at `path`, without checking its files."""
        if not is_remote(path) and path.is_symlink():
            raise CheckpointError("it is a link, which may lead anywhere")
        manifest = read_manifest(self._copy(path))
        if manifest.position.step != step:
            raise CheckpointError(f"it contains step {manifest.position.step}")
        return manifest

    def verify(self, path: Path, manifest: Manifest) -> None:
        verify_checkpoint(self._copy(path), manifest)
        self._verified = path

    def local(self, path: Path) -> Path:
        """Return the local path to read the checkpoint from: `path`, or this object's copy."""
        try:
            local = self._copy(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
        if local != path and path != self._verified:  # each process has its own copy
            self.verify(path, read_manifest(local))
        return local

    def retire(self, pinned: Collection[int] = ()) -> None:
        """Delete checkpoints that need not be kept; never the newest or those of steps `pinned`."""
        newest = dict(self.paths())  # the last one of each step
        kept = [step for step in newest if self._keep_every and not step % self._keep_every]
        kept += pinned
        kept += list(newest)[-self._keep :]
        for step, path in self.paths():
            if step not in kept or newest[step] != path:
                self._delete(path)

    def temporary(self, step: int, token: int, number: int) -> Path:
        """Return this process's path to write `step` to, unique to this start and save."""
        return self.folder / f".saving-{step:09d}-{token}-{number}"

    def upload(self, temporary: Path, files: Iterable[str]) -> None:
        """Move the `files` written by this process to the shared location."""

    def commit(self, temporary: Path, step: int) -> None:
        """Commit the written checkpoint, in place of an existing one of the same step."""
        path, before = self.folder / str(step), self.folder / f"{_REPLACED}{step}"
        # A rename replaces no folder that has files; `clean` ends what is killed between the two.
        if path.exists():
            self.discard(before)
            os.rename(path, before)
        os.rename(temporary, path)
        sync_folder(self.folder)
        self.discard(before)

    def discard(self, leftover: Path) -> None:
        if leftover.is_symlink():  # which a later save would write through
            leftover.unlink()
        shutil.rmtree(leftover, ignore_errors=True)

    def clean(self) -> set[int]:
        """Delete incomplete checkpoints left behind by killed processes; return their steps."""
        unfinished = set[int]()
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f"{self.folder} is not a folder; checkpoints go there: remove it")
        for name in self._names():
            if name.startswith(_REPLACED):
                path = self.folder / name.removeprefix(_REPLACED)
                if not path.exists():  # killed between two renames
                    os.rename(self.folder / name, path)
            if name.startswith(_LEFTOVERS):
                self.discard(self.folder / name)
            if saving := _UNFINISHED.match(name):
                unfinished.add(int(saving["step"]))
        return unfinished

    def _names(self) -> list[str]:
        return names(self.folder) if self.folder.is_dir() else []

    def _copy(self, path: Path) -> Path:
        """Return a path from which any library can read the checkpoint at `path`."""
        return path

    def _delete(self, path: Path) -> None:
        # If killed during deletion, a partial checkpoint must not look like a complete one.
        retired = path.with_name(f".retired-{path.name}-{os.getpid()}")
        os.rename(path, retired)
        self.discard(retired)

    def _set_aside(self, path: Path) -> str:
        """Rename the checkpoint at `path` so that it is no longer used; return its new name."""
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
                f"{path} failed verification and cannot be set aside ({error.strerror}); make its "
                "folder writable"
            ) from error


class RemoteStore(Store):
    """The checkpoints in a folder of an object store."""

    shows_begun = False

    is_shared = False

    def __init__(self, folder: Path, keep: int, keep_every: int | None) -> None:
        super().__init__(folder, keep, keep_every)
        self._copies: dict[str, Path] = {}

    def temporary(self, step: int, token: int, number: int) -> Path:
        """Return a folder of this process with the checkpoint's final name."""
        beside = Path(tempfile.mkdtemp(prefix="replicax-"))
        return beside / f"step-{step:09d}.{token * 10**6 + number}"

    def upload(self, temporary: Path, files: Iterable[str]) -> None:
        copy_files(temporary, self.folder / temporary.name, files)

    def commit(self, temporary: Path, step: int) -> None:
        manifest = (temporary / MANIFEST).read_bytes()
        write_whole(self.folder / temporary.name / MANIFEST, manifest)

    def discard(self, leftover: Path) -> None:
        """Delete this process's local copy; `clean` deletes uploads that were not committed."""
        shutil.rmtree(leftover.parent, ignore_errors=True)

    def clean(self) -> set[int]:
        unfinished = set[int]()
        for name in names(self.folder):
            if name.startswith("step-") and not _ENDED & set(names(self.folder / name)):
                remove_below(self.folder / name)
                if match := _OTHERWISE.fullmatch(name):
                    unfinished.add(int(match["step"]))
        return unfinished

    def _names(self) -> list[str]:
        return [name for name in names(self.folder) if MANIFEST in names(self.folder / name)]

    def _copy(self, path: Path) -> Path:
        """Return a download of all files in the manifest, deleted along with this object."""
        if path.name in self._copies:
            return self._copies[path.name]
        copy = Path(tempfile.mkdtemp(prefix="replicax-"))
        weakref.finalize(self, shutil.rmtree, copy, ignore_errors=True)
        try:
            copy_files(path, copy, [MANIFEST])
            copy_files(path, copy, read_manifest(copy).files)
        except FileNotFoundError as error:
            raise CheckpointError("a file listed in its manifest is missing") from error
        self._copies[path.name] = copy
        return copy

    def _delete(self, path: Path) -> None:
        remove(path / MANIFEST)  # first, so that a partial deletion leaves no checkpoint
        remove_below(path)

    def _set_aside(self, path: Path) -> str:
        write_whole(path / _REFUSED, read_touched(path / MANIFEST)[0])
        remove(path / MANIFEST)
        return f"{path.name}/{_REFUSED}"


def is_complete(path: Path | None, total: int | None) -> bool:
    """Whether a run of so many steps is saved in its folder, as far as its names tell."""
    if path is None or total is None:
        return False
    with contextlib.suppress(OSError):  # asked again
        saved = Store(path / CHECKPOINTS, 1, None).paths()
        return bool(saved) and saved[-1][0] >= total
    return False

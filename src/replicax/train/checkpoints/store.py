"""A run's checkpoints on disk: which there are, which is good, which are kept.

step-000000120/       whole, and in its place by one rename
step-000000120.2/     the same, saved once more: after its evaluation, say
.saving-000000160-3-7 being written, or left by a start that was killed
.retired-...          being deleted
refused-...           a checkpoint that was not what its manifest says; for a person to look at
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from replicax.errors import CheckpointError, ConfigError
from replicax.train.checkpoints.manifest import ArrayEntry, Manifest, read_manifest
from replicax.train.checkpoints.verification import check_arrays, verify
from replicax.train.places import sync_folder

_COMMITTED = re.compile(r"step-(\d{9,18})(?:\.([2-9]|[1-9]\d{1,8}))?")
LOSSES = "losses"
"""The window of losses that spikes are compared with."""

_LEFTOVERS = (".saving-", ".retired-")


class Store:
    """The checkpoints in `folder`.

    Only process 0 of a run's holder changes anything there, but for arrays being written.

    Args:
        folder: need not be there.
        keep: the newest ones that stay.
        keep_every: those of a multiple of so many steps stay as well; None for none.

    Raises:
        ConfigError: numbers that would keep nothing.
    """

    def __init__(self, folder: Path, keep: int, keep_every: int | None) -> None:
        self.folder = folder
        self._keep, self._keep_every = keep, keep_every
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}; it is at least 1: raise it")

    def paths(self) -> list[tuple[int, Path]]:
        """Steps and folders of all that are in their place, the oldest first."""
        if not self.folder.is_dir():
            return []
        found = filter(None, map(_COMMITTED.fullmatch, os.listdir(self.folder)))
        ordered = sorted((int(match[1]), int(match[2] or 1), match[0]) for match in found)
        return [(step, self.folder / name) for step, _, name in ordered]

    def temporary(self, step: int, token: int, number: int) -> Path:
        """Where that of `step` is written; no other start of the run has this path.

        Args:
            step: updates done.
            token: of the run's lease.
            number: of the save in this start.
        """
        return self.folder / f".saving-{step:09d}-{token}-{number}"

    def newest_good(
        self, wanted: Mapping[str, ArrayEntry], refuse: Callable[[str], None]
    ) -> tuple[Path, Manifest] | None:
        """The newest checkpoint that is what its manifest says; None where there is none.

        Those that are not are set aside.

        Args:
            wanted: the arrays of the run.
            refuse: told of each that is set aside, and why, in one line.

        Raises:
            ConfigError: it is good, and of another model.
        """
        for step, path in reversed(self.paths()):
            try:
                manifest = read_placed(step, path)
                verify(path, manifest)
            except CheckpointError as error:
                aside = self._aside(path)
                refuse(f"refused step {step:,}: {error} (set aside as {aside.name})")
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

    def commit(self, temporary: Path, step: int) -> None:
        """Put what was written in its place, beside what is there of the same step."""
        path = first = self.folder / f"step-{step:09d}"
        again = 1
        while path.exists():
            again += 1
            path = first.with_name(f"{first.name}.{again}")
        os.rename(temporary, path)
        sync_folder(self.folder)

    def retire(self, pinned: Collection[int] = ()) -> None:
        """Delete those that need not be kept; never the newest, nor those of the steps `pinned`."""
        newest = dict(self.paths())  # of each step the last
        kept = [step for step in newest if self._keep_every and not step % self._keep_every]
        kept += pinned
        kept += list(newest)[-self._keep :]
        for step, path in self.paths():
            if step not in kept or newest[step] != path:
                self._delete(path)

    def clean(self) -> None:
        """Delete what starts that were killed have left half done.

        Raises:
            ConfigError: the folder is none, or elsewhere.
        """
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise ConfigError(f"{self.folder} is no folder; the checkpoints go there: remove it")
        if not self.folder.is_dir():
            return
        for name in os.listdir(self.folder):
            if name.startswith(_LEFTOVERS):
                self.discard(self.folder / name)

    def discard(self, leftover: Path) -> None:
        """Delete what is no checkpoint, as far as that can be done."""
        shutil.rmtree(leftover, ignore_errors=True)

    def _delete(self, path: Path) -> None:
        # Killed in the middle of it, half a checkpoint must not be in a whole one's place.
        retired = path.with_name(f".retired-{path.name}-{os.getpid()}")
        os.rename(path, retired)
        self.discard(retired)

    def _aside(self, path: Path) -> Path:
        number = 1
        while (aside := path.with_name(f"refused-{path.name}-{number}")).exists():
            number += 1
        try:
            os.rename(path, aside)
        except OSError as error:
            raise CheckpointError(
                f"{path} is not to be trusted and cannot be set aside ({error.strerror}); make its "
                "folder writable"
            ) from error
        return aside


def read_placed(step: int, path: Path) -> Manifest:
    """The manifest of a checkpoint in the place of `step`; its files are not looked at.

    Raises:
        CheckpointError: there is none that belongs there.
    """
    if path.is_symlink():
        raise CheckpointError("it is a symbolic link")
    manifest = read_manifest(path)
    if manifest.position.step != step:
        raise CheckpointError(f"it holds step {manifest.position.step}")
    return manifest

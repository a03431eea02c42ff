"""A run's checkpoints on disk: which there are, which is good, which are kept.

step-000000120/       whole, and in its place by one rename (see `folders`, also of object stores)
step-000000120.2/     the same, saved once more: after its evaluation, say
.saving-000000160-3-7 being written, or left by a start that was killed
.retired-...          being deleted
refused-...           a checkpoint that was not what its manifest says; for a person to look at
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from replicax.errors import CheckpointError, ConfigError
from replicax.train.checkpoints.folders import Folders, RemoteFolders
from replicax.train.checkpoints.manifest import ArrayEntry, Manifest, read_manifest
from replicax.train.checkpoints.verification import check_arrays, verify
from replicax.train.places import is_remote

_COMMITTED = re.compile(r"step-(\d{9,18})(?:\.([2-9]|[1-9]\d{1,17}))?")
LOSSES = "losses"
"""The window of losses that spikes are compared with."""


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
        self._folders = RemoteFolders(folder) if is_remote(folder) else Folders(folder)
        self._keep, self._keep_every = keep, keep_every
        self._verified: Path | None = None
        for name, value in (("keep", keep), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}; it is at least 1: raise it")

    def paths(self) -> list[tuple[int, Path]]:
        """Steps and folders of all that are in their place, the oldest first."""
        found = filter(None, map(_COMMITTED.fullmatch, self._folders.names()))
        ordered = sorted((int(match[1]), int(match[2] or 1), match[0]) for match in found)
        return [(step, self.folder / name) for step, _, name in ordered]

    def temporary(self, step: int, token: int, number: int) -> Path:
        """Where that of `step` is written; no other start of the run has this path.

        Args:
            step: updates done.
            token: of the run's lease.
            number: of the save in this start.
        """
        return self._folders.temporary(step, token, number)

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

    def commit(self, temporary: Path, step: int) -> None:
        """Put what was written in its place, beside what is there of the same step."""
        self._folders.commit(temporary, step)

    def retire(self, pinned: Collection[int] = ()) -> None:
        """Delete those that need not be kept; never the newest, nor those of the steps `pinned`."""
        newest = dict(self.paths())  # of each step the last
        kept = [step for step in newest if self._keep_every and not step % self._keep_every]
        kept += pinned
        kept += list(newest)[-self._keep :]
        for step, path in self.paths():
            if step not in kept or newest[step] != path:
                self._folders.delete(path)

    def clean(self) -> None:
        """Delete what starts that were killed have left half done.

        Raises:
            ConfigError: the folder is none, or elsewhere.
        """
        self._folders.clean()

    def discard(self, leftover: Path) -> None:
        """Delete what is no checkpoint, as far as that can be done."""
        self._folders.discard(leftover)

    @property
    def is_shared(self) -> bool:
        """Whether all processes write into one folder; else each uploads what it has written."""
        return self._folders.is_shared

    def upload(self, temporary: Path, files: Iterable[str]) -> None:
        """Have the `files` that this process has written where all are."""
        self._folders.upload(temporary, files)

    def read_placed(self, step: int, path: Path) -> Manifest:
        """The manifest of a checkpoint in the place of `step`; its files are not looked at.

        Raises:
            CheckpointError: there is none that belongs there.
        """
        manifest = read_manifest(self._folders.local(path))
        if manifest.position.step != step:
            raise CheckpointError(f"it holds step {manifest.position.step}")
        return manifest

    def verify(self, path: Path, manifest: Manifest) -> None:
        """Hold the checkpoint at `path` against its manifest; see `verification.verify`."""
        verify(self._folders.local(path), manifest)
        self._verified = path

    def local(self, path: Path) -> Path:
        """Where the checkpoint at `path` is to be read: there, or in a copy that goes with this.

        Raises:
            CheckpointError: what was copied is not what its manifest says, or cannot be read.
        """
        try:
            local = self._folders.local(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from error
        if local != path and path != self._verified:  # each process has a copy of its own
            self.verify(path, read_manifest(local))
        return local

    def _aside(self, path: Path) -> str:
        try:
            return self._folders.set_aside(path)
        except OSError as error:
            raise CheckpointError(
                f"{path} is not to be trusted and cannot be set aside ({error.strerror}); make its "
                "folder writable"
            ) from error

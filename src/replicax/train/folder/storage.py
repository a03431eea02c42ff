"""The storage of a run, whoever writes its folder, and if it has none; states of one island."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from replicax.core.ground.job import Job
from replicax.core.ground.train_state import TrainState
from replicax.errors import CheckpointError, check_found
from replicax.train.checkpoints.arrays import abstract, array_entries, read
from replicax.train.checkpoints.manifest import ArrayEntry, Position
from replicax.train.checkpoints.saver import Saver
from replicax.train.checkpoints.store import CHECKPOINTS, Store, check_arrays
from replicax.train.files.fingerprint import sha256
from replicax.train.files.places import refuse_links
from replicax.train.files.records import Record, RunFolder
from replicax.train.folder.goodput import Ledger
from replicax.train.folder.saving import Saving

WRITER = "island"
"""Entry of a checkpoint's manifest: the index of the island that wrote it."""


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    path: Path
    position: Position
    extra: dict[str, Any]
    records: list[Record]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """How a run uses its folder, whoever writes it."""

    path: Path
    config: dict[str, Any]
    """The configuration, to which are added the program and its bits when they are known."""
    saving: Saving
    job: Job
    arrays: dict[str, ArrayEntry]
    """Entries of the state that is saved; empty if none is."""
    seed: int
    say: Callable[[str], None]
    alarm: Callable[[str], None]
    accept_changes: bool = False
    never_finite: Collection[str] = ()
    pinned: Callable[[], Collection[int]] = tuple
    island: int | None = None
    """Index of this island, if there are several."""
    has_own: bool = False
    """Whether this island saves what it has for itself."""

    def store(self) -> Store:
        if self.saving.wanted:
            check_found("orbax.checkpoint", "checkpoints")
        return Store(self.path / CHECKPOINTS, self.saving.keep, self.saving.keep_every)


class IslandCheckpoints:
    """Checkpoints of one island, in `islands/<index>` of a run's folder, on this host's disk.

    Those that the island wrote for the run, in `main`, are its own as well.
    """

    def __init__(self, options: FolderOptions, main: Store) -> None:
        folder = options.path / "islands" / str(options.island)
        refuse_links((folder.parent, folder, folder / CHECKPOINTS))
        self._store = Store(folder / CHECKPOINTS, options.saving.keep, None)
        self._index, self._main = options.island, main
        self._saver = Saver(self._store, 1, lambda: None, options.job, options.seed, {})

    def save(self, state: TrainState, position: Position) -> None:
        """Begin to save; see `Saver.save`."""
        self._saver.save(state, position, {WRITER: self._index})

    def poll(self) -> list[str]:
        """Return the alarms about saves since the last call."""
        return self._saver.poll()

    def wait(self) -> None:
        """Wait for a running save."""
        self._saver.wait()

    def found(
        self, state: TrainState, step: int, refuse: Callable[[str], None]
    ) -> TrainState | None:
        """Return the state of this island at a step at which all agreed on that of `state`."""
        wanted = array_entries(state)
        for store in (self._store, self._main):
            for saved, path in reversed(store.paths()):
                if saved != step:
                    continue
                with contextlib.suppress(OSError):  # as if it were not there
                    try:
                        manifest = store.read_placed(step, path)
                        if manifest.extra.get(WRITER) != self._index:
                            continue
                        store.verify(path, manifest)
                        check_arrays(manifest.arrays, wanted)
                        restored = read(abstract(state), store.local(path))
                    except CheckpointError as error:
                        refuse(f"{path} is not used: {error}")
                        continue
                    if sha256(restored.params) == sha256(state.params):
                        return restored
        return None


class Storage:
    """A storage that finds nothing and writes nothing, as of a run without a folder.

    The others are `WrittenFolder`, and `FollowedFolder` if another island writes.
    """

    path: Path | None = None
    folder: RunFolder | None = None
    """The files of the run, in the process that writes them."""
    found: ResumePoint | None = None
    own: IslandCheckpoints | None = None
    """States of this island alone, if its run has any."""
    follows = False
    """Whether another island writes the folder."""
    knows_program = True
    """Whether the program was compared already, so that `check_program` need not."""
    traced = ""
    """The batch with which an earlier start traced the program; empty if none did."""

    def __init__(self) -> None:
        self.ledger = Ledger(None)

    def begin(self) -> None:
        """Look for what to resume from; all processes must call it."""

    def check_program(self, program: dict[str, str]) -> None:
        """Compare the program once the first batch is known; all processes must call it."""

    def check_bits(self, programs: dict[str, str]) -> None:
        """Warn if the results will differ bitwise because the compiled programs changed."""

    def restore(self, like: TrainState) -> TrainState:
        """Return the state that was `found`, placed like `like`."""
        raise NotImplementedError

    def save(self, state: TrainState, position: Position, extra: dict[str, Any]) -> None:
        """Start to save `state` unless it is saved already; see `Saver.save`."""

    def finish(self, state: TrainState, position: Position, extra: dict[str, Any]) -> None:
        """Save `state`, and wait until it is."""

    def tell(self) -> None:
        """Report the outcome of saves; raises the errors of `Saver.poll`."""

    def goes_on(self, step: int, *, terminated: bool) -> bool:
        """Whether this start may go on without the others, most of which have `terminated`."""
        return terminated

    def taken_over(self, records: Sequence[Record], *, must: bool) -> "Storage":
        """Return what writes the folder from now on, as the island that did is gone.

        The files then have the `records` of this island. Unless it `must`, this may fail for now,
        as on a full disk, and return the same storage.
        """
        return self

    def all_still_write(self) -> bool:
        """Whether no newer start has taken over the folder; all processes must call it."""
        return True

    def close(self) -> None:
        """Write what is left, and let others write the folder."""


def what_is_saved(position: Position, extra: dict[str, Any]) -> Any:
    """Return the parts that distinguish two checkpoints of a start; step times do not count."""
    return position, extra.get("evaluated"), extra.get("hooks")

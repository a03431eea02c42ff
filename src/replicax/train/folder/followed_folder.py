"""The folder of a run that another island writes, until that one is gone."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicax.core.ground.train_state import TrainState
from replicax.errors import CheckpointError, ConfigError, ReplicaxError
from replicax.text.wording import first_line
from replicax.train.checkpoints.manifest import Position
from replicax.train.files.lease import Lease, last_renewal, take_lease
from replicax.train.files.records import Record
from replicax.train.folder.storage import FolderOptions, IslandCheckpoints, Storage, what_is_saved
from replicax.train.folder.written_folder import WrittenFolder


class FollowedFolder(Storage):
    """A folder in which this start writes nothing but the states of its own island."""

    follows = True

    def __init__(self, options: FolderOptions) -> None:
        super().__init__()
        self.path: Path = options.path
        self._options, self._alarm = options, options.alarm
        self.knows_program = "program" in options.config
        self._store = options.store()
        self.own = IslandCheckpoints(options, self._store) if options.has_own else None
        # If it is the same later, nobody renews here: not the folder of the island that writes.
        self._renewed = last_renewal(options.path)
        self._lease: Lease | None = None
        self._saved: Any = None
        self._told_failure = False

    def check_program(self, program: dict[str, str]) -> None:
        self._options.config["program"], self.knows_program = program, True

    def check_bits(self, programs: dict[str, str]) -> None:
        self._options.config["bits"] = programs

    def save(self, state: TrainState, position: Position, extra: dict[str, Any]) -> None:
        what = what_is_saved(position, extra)
        if what != self._saved and self.own is not None:
            self.own.save(state, position)
            self._saved = what

    def finish(self, state: TrainState, position: Position, extra: dict[str, Any]) -> None:
        self.save(state, position, extra)
        if self.own is not None:
            self.own.wait()
        self.tell()

    def tell(self) -> None:
        for line in self.own.poll() if self.own else ():
            self._saved = None  # the save failed, so that another of the same state is due
            self._alarm(line)

    def goes_on(self, step: int, *, terminated: bool) -> bool:
        """Whether this start may go on without the others, most of which have `terminated`.

        It does if it holds the lease of the run, which it takes if nobody holds it. False if there
        is a checkpoint after `step`, of others that went on; or if this is not the folder of the
        island that writes, as no lease was renewed in it.
        """
        if not self._options.saving.wanted:  # there is no lease
            return terminated
        with contextlib.suppress(ReplicaxError, OSError):
            if not terminated and last_renewal(self.path) == self._renewed:
                return False
            self._lease = self._lease or take_lease(self.path)
            self._lease.check()
            saved = [at for at, _ in self._store.paths()]
            return not saved or saved[-1] <= step
        return False

    def taken_over(self, records: Sequence[Record], *, must: bool) -> Storage:
        writes = WrittenFolder(self._options, self)
        try:
            writes.take_over(self._forced_lease, records)
        except (ConfigError, CheckpointError) as error:
            if must:
                raise
            if not self._told_failure:
                self._alarm(f"{self.path} cannot be taken over yet: {first_line(error)}")
            self._told_failure = True
            return self
        return writes

    def _forced_lease(self) -> Lease | None:
        """Return the lease, at once: the others agreed that its holder is gone."""
        if self._options.saving.wanted and self._lease is None:
            self._lease = take_lease(self.path, by_force=True)
        return self._lease

    def close(self) -> None:
        if self._lease is not None:
            self._lease.release()

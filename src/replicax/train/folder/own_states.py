"""States that each island of a run with rounds has for itself: saved apart, and found again."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from replicax.core.ground.job import Job
from replicax.core.ground.train_state import TrainState
from replicax.errors import CheckpointError
from replicax.train.checkpoints.arrays import abstract, array_entries, read
from replicax.train.checkpoints.manifest import Position
from replicax.train.checkpoints.saver import Saver
from replicax.train.checkpoints.store import CHECKPOINTS, Store, check_arrays
from replicax.train.files.fingerprint import sha256
from replicax.train.files.places import refuse_links
from replicax.train.folder.saving import Saving

WRITER = "island"
"""Entry of a checkpoint's manifest: the index of the island that wrote it."""


class OwnStates:
    """Checkpoints of island `index`, in `islands/<index>` of a run's folder, on this host's disk.

    Those that the island wrote for the run, in `main`, are its own as well.
    """

    def __init__(
        self, folder: Path, index: int | None, saving: Saving, job: Job, seed: int, main: Store
    ) -> None:
        own = folder / "islands" / str(index)
        refuse_links((own.parent, own, own / CHECKPOINTS))
        self._store = Store(own / CHECKPOINTS, saving.keep, None)
        self._index, self._main = index, main
        self._saver = Saver(self._store, 1, lambda: None, job, seed, {})

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
                with contextlib.suppress(OSError):
                    try:
                        manifest = store.read_placed(step, path)
                        if manifest.extra.get(WRITER) != self._index:
                            continue
                        store.verify(path, manifest)
                        check_arrays(manifest.arrays, wanted)
                        own = read(abstract(state), store.local(path))
                    except CheckpointError as error:
                        refuse(f"{path} is not used: {error}")
                        continue
                    if sha256(own.params) == sha256(state.params):
                        return own
        return None

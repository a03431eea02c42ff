"""Save checkpoints during training: one at a time, complete in all processes or not at all."""

import contextlib
import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from replicax.core.ground.job import Job
from replicax.core.ground.train_state import TrainState
from replicax.errors import CheckpointError, RunInUseError
from replicax.text.wording import first_line
from replicax.train.checkpoints.arrays import ITEM, array_entries, begin_writing, params_not_finite
from replicax.train.checkpoints.manifest import (
    ArrayEntry,
    FileEntry,
    Manifest,
    Position,
    file_entries,
    write_manifest,
)
from replicax.train.checkpoints.store import Store
from replicax.train.checkpoints.with_orbax import finish_orbax

_Result = TypeVar("_Result")
MOST_FAILURES = 3
"""Consecutive failed saves after which the run stops, to limit the work that may be lost."""


@dataclasses.dataclass(eq=False)
class Saver:
    """Saves states into `store` while training continues."""

    store: Store
    token: int
    """Token of the run's lease."""
    check: Callable[[], None]
    """Raises if another process took over the run; called before a checkpoint is committed."""
    job: Job
    seed: int
    config: dict[str, Any]
    not_finite: Collection[str] = ()
    """Parameters that were not finite when the run began, and may stay so."""
    pinned: Callable[[], Collection[int]] = tuple
    """Returns the steps whose checkpoints are kept in any case."""

    saved_step: int | None = None
    """Step of the newest committed checkpoint."""
    _number: int = 0
    _failures: int = 0  # in a row
    _arrays: dict[str, ArrayEntry] | None = None
    _thread: threading.Thread | None = None
    _failed: str | None = None
    _broken: BaseException | None = None
    _alarms: list[str] = dataclasses.field(default_factory=list)

    def save(self, state: TrainState, position: Position, extra: dict[str, Any]) -> None:
        """Begin to save `state`; returns once it is copied, so the next step may consume it.

        All processes must call it. Waits for the previous save if it is still running.
        """
        self.wait()
        self._arrays = self._arrays or array_entries(state)  # the same in every save
        self._number += 1
        folder = self.store.temporary(position.step, self.token, self._number)
        manifest = Manifest(
            position=position,
            token=self.token,
            saved_at=time.time(),
            seed=self.seed,
            arrays=self._arrays,
            files={},
            config=self.config,
            extra=extra,
        )

        def begun() -> Callable[[], None]:
            if wrong := sorted(params_not_finite(state).difference(self.not_finite)):
                raise CheckpointError(f"{wrong[0]} is no longer finite")
            packed = self.store.is_shared or self.job.processes == 1
            return begin_writing(state, folder, packed=packed)

        written, fault = _tried(begun)
        arguments = (
            folder,
            manifest,
            written,
            fault,
            f"save {self._number} of start {self.token}",
        )
        # A daemon: a disk that hangs must not keep a process that fails from its exit.
        self._thread = threading.Thread(target=self._finish, args=arguments, daemon=True)
        self._thread.start()

    def poll(self) -> list[str]:
        """Return the alarms about saves since the last call; does not wait."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()
        alarms, self._alarms = self._alarms, []
        return alarms

    def wait(self) -> bool:
        """Wait for a running save, if any; return whether the last one succeeded."""
        if self._thread is not None:
            self.job.rest()  # a slow disk is not a stalled process
            self._thread.join()
            self._thread = None
            self.job.move()
            self._judge()
        return self._failures == 0

    def _judge(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._failed is None:
            self._failures = 0
            return
        self._failures += 1
        good = "no step has been saved yet"
        if self.saved_step is not None:
            good = f"step {self.saved_step:,} is the last good checkpoint"
        if self._failures >= MOST_FAILURES:
            raise CheckpointError(
                f"{self._failures} saves in a row have failed: {self._failed}; {good}: free disk "
                f"space or repair {self.store.folder}, and restart"
            )
        self._alarms.append(
            f"a save has failed ({self._failures} in a row): {self._failed}; {good}"
        )

    def _finish(
        self,
        folder: Path,
        manifest: Manifest,
        written: Callable[[], None] | None,
        fault: str | None,
        topic: str,
    ) -> None:
        """In the background: commit in process 0 once all processes have written their shards."""
        try:
            mine = fault if written is None else _tried(written)[1]
            failed, files = self._first(f"{topic}: written", mine), None
            if failed is None and not self.store.is_shared:
                failed, files = self._uploaded(folder, f"{topic}: uploaded")
            if failed is None:
                mine = None
                if self.job.process == 0:
                    _, mine = _tried(lambda: self._commit(folder, manifest, files))
                    if mine is None:
                        with contextlib.suppress(OSError):  # keeping too many is harmless
                            self.store.retire(self.pinned())
                failed = self._first(f"{topic}: in its place", mine)
            if failed is None:
                self.saved_step = manifest.position.step
            # In a shared folder a rename has left nothing, unless the save has failed.
            if not self.store.is_shared or (failed is not None and self.job.process == 0):
                self.store.discard(folder)
            self._failed = failed
        except BaseException as error:  # raised in the main thread
            self._broken = error

    def _first(self, topic: str, mine: str | None) -> str | None:
        errors = self.job.gather(topic, mine, slow=True)
        return next((error for error in errors if error), None)

    def _uploaded(self, folder: Path, topic: str) -> tuple[str | None, dict[str, FileEntry]]:
        """Upload this process's files; return the first error, if any, and all processes' files."""
        hashed, mine = _tried(lambda: self._files(folder))
        files = hashed or {}
        entries = {path: [entry.bytes, *entry.sha256] for path, entry in files.items()}
        gathered = self.job.gather(topic, [mine, entries], slow=True)
        for _, part in gathered:
            files |= {path: FileEntry(size, tuple(sha)) for path, (size, *sha) in part.items()}
        return next((error for error, _ in gathered if error), None), files

    def _files(self, folder: Path) -> dict[str, FileEntry]:
        if self.job.process == 0:
            finish_orbax(folder / ITEM)
        files = file_entries(folder)
        self.store.upload(folder, files)
        return files

    def _commit(self, folder: Path, manifest: Manifest, files: dict[str, FileEntry] | None) -> None:
        if files is None:
            files = self._files(folder)
        write_manifest(folder, dataclasses.replace(manifest, files=files))
        # As late as possible: another start may take over while the files are written.
        try:
            self.check()
        except RunInUseError as error:
            self._broken = error  # ends the run, as no later save can succeed
            raise
        self.store.commit(folder, manifest.position.step)


def _tried(function: Callable[[], _Result]) -> tuple[_Result | None, str | None]:
    """Return the result of `function`, or its error, as the operating system's text if possible."""
    try:
        return function(), None
    except Exception as error:  # storage errors have many types
        if isinstance(error, CheckpointError | RunInUseError):
            return None, str(error)
        if isinstance(error, OSError) and error.strerror:
            return None, error.strerror
        number = re.search(r"os_error_code='(\d+)'|\[OS error (\d+):", str(error))
        return None, os.strerror(int(number[1] or number[2])) if number else first_line(error)

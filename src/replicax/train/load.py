"""A checkpoint of a run, opened to be used: the run's folder stays as it is, whoever holds it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replicax.core.data_parallel import DataParallel
from replicax.core.update import TrainState
from replicax.errors import CheckpointError, ConfigError, require
from replicax.train.changes import read_config
from replicax.train.checkpoints.arrays import array_entries, read
from replicax.train.checkpoints.manifest import MANIFEST, Manifest
from replicax.train.checkpoints.store import CHECKPOINTS, LOSSES, STATE, Store, check_arrays
from replicax.train.places import exists, is_remote
from replicax.train.records import CONFIG, Record, read_records
from replicax.wording import named

BEST = "best.json"
_OF_THE_RUN_ALONE = (LOSSES, "reduction")
"""Fields of a state that only a run going on needs: a state without them is loaded without them."""
_MOST_NAMED = 6


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A checkpoint of a run, on the devices of `dp`; from `rx.load`.

    Examples:
        >>> _ = rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x")
        >>> run = rx.load("runs/x", dp=dp, state=dp.abstract_state(model))
        >>> run.step, run.model["w"].shape
        (8, (3,))
    """

    dp: DataParallel
    """Steps and evaluates `state`."""
    state: TrainState
    """All that was saved, placed as `dp` places it."""
    step: int
    """Updates done."""
    records: list[Record]
    """The run's, up to this checkpoint."""
    config: dict[str, Any]
    """The configuration that the checkpoint was saved under, as JSON has it."""
    path: Path
    """The checkpoint's folder."""
    recipe: Any = None
    """The recipe, where the run was made by `replicax train`."""

    def __repr__(self) -> str:
        return f"Loaded({self.path}, step={self.step}, {self.dp}, {self.state})"

    @property
    def model(self) -> Any:
        """The user's model, with arrays of its own; before a step consumes `state`."""
        return self.dp.model(self.state)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in its place, whose arrays have not been looked at."""

    run: Path
    store: Store
    path: Path
    manifest: Manifest
    identity: tuple[int, int] | None
    """Identity of its folder; see `_identity`."""
    others: tuple[int, ...]
    """Steps of the other checkpoints, the oldest first."""


def find_checkpoint(run: Path, step: int | str | None) -> Checkpoint:
    """The checkpoint of `step` in the folder of a run; see `rx.load`."""
    with _readable(run):
        return _found(run, step)


def _found(run: Path, step: int | str | None) -> Checkpoint:
    if not is_remote(run) and not run.is_dir():
        raise ConfigError(f"{run} is no folder; give that of a run, as in runs/NAME")
    store = Store(run / CHECKPOINTS, keep=1, keep_every=None)
    there = dict(store.paths())  # of each step the last
    if not there and not exists(run / CONFIG):
        raise ConfigError(
            f"{run} is no run: it has no {CONFIG}; give the folder that rx.fit(run_dir=...) or "
            "replicax train has made"
        )
    if not there:
        raise ConfigError(
            f"{run} has no checkpoint: none was saved yet, or none was to be "
            "(Saving(minutes=None), --save-minutes 0); go on with the run, or train one that saves"
        )
    wanted = _wanted_step(run, step, max(there))
    if wanted not in there:
        steps = [f"{each:,}" for each in sorted(there, reverse=True)]
        raise ConfigError(
            f"{run} has no checkpoint of step {wanted:,}; there is {named(steps, _MOST_NAMED)}: "
            "choose one of these"
        )
    path = there.pop(wanted)
    others, identity = tuple(there), _identity(path)
    with _trusted(path, identity, others):
        manifest = store.read_placed(wanted, path)
    return Checkpoint(run, store, path, manifest, identity, others)


def load_checkpoint(
    checkpoint: Checkpoint, dp: DataParallel, state: TrainState, recipe: Any = None
) -> Loaded:
    """Verify a checkpoint to the byte, and read it."""
    require("orbax.checkpoint", "checkpoints")
    if not isinstance(state, TrainState):
        raise ConfigError(
            f"state is a {type(state).__name__}; it is the rx.TrainState of dp.init(model), or its "
            "shapes: give state=dp.abstract_state(model)"
        )
    like, manifest, path = dp.program(state).abstract_state(), checkpoint.manifest, checkpoint.path
    wanted = array_entries(like)
    found = {
        name: entry
        for name, entry in manifest.arrays.items()
        if name in wanted or name.partition(".")[0] not in _OF_THE_RUN_ALONE
    }
    try:
        check_arrays(found, wanted)
    except CheckpointError as error:
        raise ConfigError(f"{path} does not fit this state: {error}") from error
    with _trusted(path, checkpoint.identity, checkpoint.others):
        checkpoint.store.verify(path, manifest)
        restored = read(like, checkpoint.store.local(path) / STATE)
    with _readable(checkpoint.run):
        records = read_records(checkpoint.run, manifest.position.records)
    config, step = manifest.config, manifest.position.step
    return Loaded(dp, restored, step, records, config, path, recipe)


def _wanted_step(run: Path, step: int | str | None, newest: int) -> int:
    if step is None:
        return newest
    if type(step) is int:
        return step
    if step != "best":
        raise ConfigError(
            f'step={step!r}; it is a number of steps, "best", or None for the newest: give one'
        )
    path = run / BEST
    if not exists(path):
        raise ConfigError(f"{run} has no {BEST}: it did not keep its best; leave the step out")
    best = read_config(path).get("step")
    if type(best) is not int:
        raise ConfigError(f"{path} names no step; give the number of one")
    return best


@contextlib.contextmanager
def _readable(run: Path) -> Iterator[None]:
    """Raise `CheckpointError` where the system, or an object store, gives nothing of `run`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{run} cannot be read ({error.strerror})") from error


def _identity(path: Path) -> tuple[int, int] | None:
    """Numbers that another checkpoint in its place has not; None where there is none."""
    if is_remote(path):  # no two have one name
        return (0, 0) if exists(path / MANIFEST) else None
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _trusted(
    path: Path, identity: tuple[int, int] | None, others: tuple[int, ...]
) -> Iterator[None]:
    """Say what to do where the checkpoint at `path` is harmed, or was deleted in the meantime."""
    try:
        yield
    except CheckpointError as error:
        if _identity(path) == identity:
            steps = [f"{step:,}" for step in reversed(others)]
            instead = f"load another step ({named(steps, _MOST_NAMED)}), or " if steps else ""
            raise CheckpointError(
                f"{path} is harmed and was not loaded: {error}; {instead}start the run again, "
                "which sets it aside"
            ) from error
    # What is missing then was read as zeros. A checkpoint that is deleted loses its name first.
    if _identity(path) != identity:
        raise CheckpointError(
            f"{path} was deleted while it was read: the run goes on, and keeps its newest; load "
            "again"
        )

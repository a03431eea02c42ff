"""Load a checkpoint of a run for use, without changing the run's folder, even while it trains."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, NotRequired, TypedDict

import jax

from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import ModelT, TrainState
from replicax.errors import CheckpointError, ConfigError, require
from replicax.text.streams import alarm
from replicax.text.wording import named
from replicax.train.checkpoints.arrays import array_entries, read
from replicax.train.checkpoints.manifest import MANIFEST, Manifest
from replicax.train.checkpoints.store import CHECKPOINTS, LOSSES, Store, check_arrays
from replicax.train.files.places import exists, is_remote, read_bytes
from replicax.train.files.records import CONFIG, HISTORY, RECORDS, Record, read_records
from replicax.train.files.sealed import unsealed
from replicax.train.folder.changes import another_run, read_config

BEST = "best.json"
_OF_THE_RUN_ALONE = (LOSSES, "reduction")
"""State fields that only a resumed run needs: a state without them is loaded without them."""
_OF_ISLANDS = ("islands", "opt_state", "scale")
"""Fields of a run with rounds that a state without rounds has otherwise, or not at all."""
_MOST_NAMED = 6


class Best(TypedDict):
    """The contents of `best.json`."""

    metric: str
    value: float
    step: int
    evaluation: NotRequired[dict[str, str]]
    """Digest of the rows of each source that `value` was measured on, if they are known."""


@dataclasses.dataclass(frozen=True)
class Loaded(Generic[ModelT]):
    """A checkpoint of a run, on the devices of `dp`; from `rx.load`.

    Examples:
        >>> _ = rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x")
        >>> run = rx.load("runs/x", dp=dp, state=dp.abstract_state(model))
        >>> run.step, run.model["w"].shape
        (8, (3,))
    """

    dp: DataParallel
    """The `DataParallel` to step and evaluate `state` with."""
    state: TrainState[ModelT]
    """The whole saved state, placed as `dp` places it."""
    step: int
    """Number of updates done."""
    records: list[Record]
    """Records of the run up to this checkpoint."""
    config: dict[str, Any]
    """The configuration at the time of saving, as JSON values."""
    path: Path
    """Folder of the checkpoint."""
    recipe: Any = None
    """The recipe, if the run was made by `replicax train`."""

    def __repr__(self) -> str:
        return f"Loaded({self.path}, step={self.step}, {self.dp}, {self.state})"

    @property
    def model(self) -> ModelT:
        """A copy of the user's model; only available before a step consumes `state`."""
        return self.dp.model(self.state)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose arrays have not been read."""

    run: Path
    store: Store
    path: Path
    manifest: Manifest
    identity: tuple[int, int] | None
    """Identity of the folder; see `_identity`."""
    others: tuple[int, ...]
    """Steps of the other checkpoints, oldest first."""


def find_checkpoint(run: Path, step: int | str | None) -> Checkpoint:
    """Find the checkpoint of `step` in a run's folder; see `rx.load`."""
    with _readable(run):
        return _found(run, step)


def _found(run: Path, step: int | str | None) -> Checkpoint:
    alone = run if exists(run / MANIFEST) else None  # the folder of one checkpoint
    run = run.parent.parent if alone else run
    if not is_remote(run) and not run.is_dir():
        raise ConfigError(f"{run} is not a folder; pass the folder of a run, as in runs/NAME")
    store = Store(run / CHECKPOINTS if alone is None else alone.parent, keep=1, keep_every=None)
    there = {n: path for n, path in store.paths() if alone in (None, path)}  # the last of each step
    if not there and not exists(run / CONFIG):
        raise ConfigError(
            f"{run} is not a run: it has no {CONFIG}; pass a folder that rx.fit(run_dir=...) or "
            "replicax train created"
        )
    if not there:
        raise ConfigError(
            f"{run} has no checkpoint: none was saved yet, or saving is off (Saving(minutes=None), "
            "--save-minutes 0); continue the run, or train one that saves checkpoints"
        )
    wanted = _wanted_step(run, step, max(there))
    if wanted not in there:
        steps = [f"{each:,}" for each in sorted(there, reverse=True)]
        raise ConfigError(
            f"{run} has no checkpoint of step {wanted:,}; available: {named(steps, _MOST_NAMED)}; "
            "choose one of these"
        )
    path = there.pop(wanted)
    others, identity = tuple(there), _identity(path)
    with trusted(path, identity, others):
        manifest = store.read_placed(wanted, path)
    config: dict[str, Any] = {}
    with contextlib.suppress(ConfigError):  # the manifest has the configuration, too
        config = read_config(run / CONFIG)
    if another := another_run(config, manifest.config):
        raise ConfigError(f"{path} {another}: move it back to that run's folder, and load that one")
    return Checkpoint(run, store, path, manifest, identity, others)


def load_checkpoint(
    checkpoint: Checkpoint, dp: DataParallel, state: TrainState, recipe: Any = None
) -> Loaded:
    """Verify every byte of a checkpoint, and read it.

    A state without rounds takes the outer parameters of a run with rounds, whose optimizer states
    are those of its islands: its own is new.
    """
    require("orbax.checkpoint", "checkpoints")
    like, manifest, path = dp.program(state).abstract_state(), checkpoint.manifest, checkpoint.path
    rounds = any(name.startswith("islands.") for name in manifest.arrays)
    outer_alone = rounds and not jax.tree.leaves(like.islands)
    if outer_alone:
        like = dataclasses.replace(like, opt_state=(), losses=(), reduction=(), scale=())
    left_out = (*_OF_THE_RUN_ALONE, *(_OF_ISLANDS if outer_alone else ()))
    wanted = array_entries(like)
    saved = {
        name: entry
        for name, entry in manifest.arrays.items()
        if name in wanted or name.partition(".")[0] not in left_out
    }
    try:
        check_arrays(saved, wanted)
    except CheckpointError as error:
        raise ConfigError(
            f"{path} does not fit this state: {error}; for the model alone, whatever the "
            "optimizer: rx.load_model(run_dir, model)"
        ) from error
    with trusted(path, checkpoint.identity, checkpoint.others):
        checkpoint.store.verify(path, manifest)
        with dp.configuration.in_own_mesh():
            restored = read(like, checkpoint.store.local(path))
            if outer_alone:
                fresh = dp.program(state).init(restored.params, restored.extras, int(restored.seed))
                restored = dataclasses.replace(fresh, step=restored.step)
    with _readable(checkpoint.run):
        history = read_records(
            checkpoint.run, manifest.position.records, manifest.extra.get(HISTORY)
        )
    for fault in history.faults:
        alarm(f"{checkpoint.run / RECORDS}: {fault}")
    config, step = manifest.config, manifest.position.step
    return Loaded(dp, restored, step, history.records, config, path, recipe)


def _wanted_step(run: Path, step: int | str | None, newest: int) -> int:
    if step is None:
        return newest
    if type(step) is int:
        return step
    if step != "best":
        raise ConfigError(
            f'step={step!r}; it must be a number of steps, "best", or None (the newest): pass one'
        )
    path = run / BEST
    if not exists(path):
        raise ConfigError(f"{run} has no {BEST}: the run did not record its best; omit the step")
    try:
        return unsealed(read_bytes(path), Best)["step"]
    except ValueError as error:
        raise ConfigError(f"{path} names no step ({error}); pass a step number instead") from error


@contextlib.contextmanager
def _readable(run: Path) -> Iterator[None]:
    """Raise `CheckpointError` if the file system or object store fails to read `run`."""
    try:
        yield
    except OSError as error:
        where = error.filename or run
        raise CheckpointError(f"{where} cannot be read ({error.strerror})") from error


def _identity(path: Path) -> tuple[int, int] | None:
    """Numbers that differ for any other checkpoint at this path; None if there is none."""
    if is_remote(path):  # names are unique there
        return (0, 0) if exists(path / MANIFEST) else None
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def trusted(
    path: Path, identity: tuple[int, int] | None, others: tuple[int, ...]
) -> Iterator[None]:
    """Raise with advice if the checkpoint at `path` is damaged, or was deleted meanwhile."""
    try:
        yield
    except CheckpointError as error:
        if _identity(path) == identity:
            steps = [f"{step:,}" for step in reversed(others)]
            instead = f"load another step ({named(steps, _MOST_NAMED)}), or " if steps else ""
            raise CheckpointError(
                f"{path} is damaged and was not loaded: {error}; {instead}restart the run, "
                "which sets it aside"
            ) from error
    # Missing files were read as zeros. Deletion removes the name of a checkpoint first.
    if _identity(path) != identity:
        raise CheckpointError(
            f"{path} was deleted while it was being read, as the run continues and keeps only its "
            "newest checkpoints; load again"
        )

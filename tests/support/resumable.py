"""Runs that are cut anywhere and go on, compared with uncut ones."""

import contextlib
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.settings import grouped

import replicax as rx
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.leaves import numbers
from replicax.core.ground.train_state import TrainState
from replicax.train.files.records import Record
from replicax.train.folder.written_folder import WrittenFolder

ROWS, BATCH, BATCHES = 75, 16, 5
EPOCHS = 3
STEPS = EPOCHS * BATCHES

_TIMED = ("seconds", "rows_per_second", "input_wait_fraction")
_SAVING = ("save_every", "save_seconds", "keep")

Killed = Callable[[Path, int], Path]
"""The fixture `killed`: copies a run that was killed after so many steps to a folder."""


class CrashError(Exception):
    """Ends a run as a kill would."""


def loss(model: Any, batch: Any, key: Any) -> Any:
    """The loss of a regression with noisy inputs."""
    x = batch["x"]
    if key is not None:
        x = x * jax.random.bernoulli(key, 0.8, x.shape[1:])
    values = jnp.sum((jnp.tanh(x @ model["hidden"]) @ model["out"] - batch["y"]) ** 2, axis=-1)
    return values, {"size": jnp.abs(batch["y"]).sum(-1)}


def model() -> dict[str, jax.Array]:
    """Return a model with dims that 8 divides, so that every layout can split it."""
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape) / 4, jnp.float32)  # noqa: E731
    return {"hidden": draw(8, 16), "out": draw(16, 8)}


def rows(count: int = ROWS, seed: int = 1) -> dict[str, np.ndarray]:
    """Return inputs and targets."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 8)).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def data_parallel(
    devices: int = 8, axes: Mapping[str, int] | None = None, **settings: Any
) -> rx.DataParallel:
    """A `DataParallel` of the model above on the first `devices`, with `axes` beside `data`."""
    if settings.get("mode") != "single":
        settings["mesh"] = rx.make_mesh(devices=jax.devices()[:devices], **(axes or {}))
    return rx.DataParallel(loss, optax.adam(0.01), **settings)


def fit(dp: rx.DataParallel, folder: Path | None = None, **settings: Any) -> rx.types.Fit:
    """Run `rx.fit` of the model above; with a folder, save every third step.

    A source that is a function is called for the source of this run.
    """
    wanted: dict[str, Any] = {"source": rows(), "batch_size": BATCH, "progress": False}
    if "steps" not in settings:
        wanted["epochs"] = EPOCHS
    if folder is not None:
        wanted |= {"run_dir": folder, "save_every": 3}
    wanted |= settings
    state = wanted.pop("state", None) or dp.init(wanted.pop("model", model)())
    source = wanted.pop("source")
    return rx.fit(dp, state, source() if callable(source) else source, **grouped(wanted))


def settle() -> None:
    """Wait for all background saves."""
    for thread in threading.enumerate():
        if "(_finish)" in thread.name:
            thread.join()


@contextlib.contextmanager
def crashing(at: int, of: str = "step") -> Iterator[None]:
    """End a run within this context at `at` steps, before its next call or its next `of`.

    Args:
        at: steps that are done; where a call does several steps, at least so many.
        of: `step` (or `steps`), `evaluate`, or `finish`, the last save.
    """

    def crashes(whole: Any) -> Any:
        def crash(self: Any, state: TrainState, *arguments: Any, **more: Any) -> Any:
            if int(state.step) >= at:
                settle()
                raise CrashError
            return whole(self, state, *arguments, **more)

        return crash

    owner = WrittenFolder if of == "finish" else DataParallel
    with pytest.MonkeyPatch.context() as patch:
        for name in ("step", "steps") if of == "step" else (of,):
            patch.setattr(owner, name, crashes(getattr(owner, name)))
        with pytest.raises(CrashError):
            yield


@contextlib.contextmanager
def watching(seen: list[tuple[int, list[int]]]) -> Iterator[None]:
    """Append each step and the indices of its real rows to `seen` within this context."""
    whole = DataParallel.step

    def watched(self: DataParallel, state: TrainState, batch: Any) -> Any:
        real = np.asarray(batch.mask) > 0
        seen.append((int(state.step), np.asarray(batch.index)[real].tolist()))
        return whole(self, state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DataParallel, "step", watched)
        yield


def bits(state: TrainState) -> dict[str, bytes]:
    """Return the bytes of every array."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path): np.asarray(numbers(leaf)).tobytes() for path, leaf in leaves
    }


def told(records: list[Record]) -> list[dict[str, Any]]:
    """Return the records without times; sorted, since they may be read equally late."""
    return untimed([record.to_json() for record in records])


def written(folder: Path) -> list[dict[str, Any]]:
    """Return the records of `records.jsonl` without times."""
    return untimed((folder / "records.jsonl").read_text().splitlines())


def untimed(lines: list[str]) -> list[dict[str, Any]]:
    """Return records from `lines`, without times."""
    found = [json.loads(line) for line in lines]
    kept = [{key: each[key] for key in each if key not in _TIMED} for each in found]
    if {each["kind"] for each in kept} <= {"train", "eval"}:
        return kept
    return sorted(kept, key=lambda each: each["kind"])  # of one kind they stay in order


def check_same(found: rx.types.Fit, wanted: rx.types.Fit, folder: Path) -> None:
    """Check that a run in `folder` ended like the undisturbed one, to the bit and the record."""
    assert bits(found.state) == bits(wanted.state)
    assert told(found.records) == told(wanted.records)
    assert written(folder) == told(wanted.records)


def steps_saved(folder: Path) -> list[str]:
    """Return the names of the complete checkpoints."""
    return sorted((path.name for path in (folder / "checkpoints").glob("[0-9]*")), key=int)


def whole(dp: rx.DataParallel, **settings: Any) -> rx.types.Fit:
    """Return the uncut run, without a folder; it runs once for the same arguments."""
    known = _WHOLE.setdefault(dp, {})
    settings = {name: value for name, value in settings.items() if name not in _SAVING}
    key = str(sorted(settings.items(), key=str))
    if key not in known:
        known[key] = fit(dp, **settings)
    return known[key]


_WHOLE: weakref.WeakKeyDictionary[rx.DataParallel, dict[str, rx.types.Fit]] = (
    weakref.WeakKeyDictionary()
)


def resumed(
    dp: rx.DataParallel, folder: Path, at: int, of: str = "step", **settings: Any
) -> rx.types.Fit:
    """Check that a run that is cut at step `at` and goes on ends as the uncut one; return it."""
    with crashing(at, of):
        fit(dp, folder, **settings)
    found = fit(dp, folder, **settings)
    check_same(found, whole(dp, **settings), folder)
    return found

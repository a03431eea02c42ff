"""A run's folder with random damage: the right arrays, or one clear line."""

import collections
import random
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chaos.runs.corruption import corrupt
from support.resumable import bits
from support.saved_checkpoint import POSITION
from support.tiers import only

import replicax as rx
from replicax.core.data.sources import as_source
from replicax.core.ground.job import Alone
from replicax.core.ground.train_state import TrainState
from replicax.errors import ReplicaxError
from replicax.train import lease
from replicax.train.checkpoints.arrays import abstract
from replicax.train.checkpoints.manifest import Position
from replicax.train.records import Record
from replicax.train.run_state import first_batch
from replicax.train.saving import Saving
from replicax.train.storage import Storage

FOLDERS, MANY_FOLDERS = 60, 250
CONFIG = {"fields": {"rate": 1, "layers": [1, 2]}, "parallel": {"mode": "jit"}}
SAVING = Saving(every=1)
STEPS = (2, 4)
SOURCE = as_source({"x": np.zeros(10)}, 2, Alone(), shuffle=False, seed=0)


def state_at(step: int) -> TrainState:
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    made = TrainState(jnp.int32(step), {"w": jnp.arange(4.0) + step}, (), {}, jnp.uint32(3))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, where), made)


def position_at(step: int) -> Position:
    return Position(**{**vars(POSITION), "step": step, "epoch": 0, "rows": 4, "records": step})


def opened(folder: Path, said: list[str], accept: bool = False) -> Storage:
    return Storage(
        folder,
        CONFIG,
        SAVING,
        Alone(),
        accept_changes=accept,
        state=state_at(0),
        seed=0,
        say=said.append,
        alarm=said.append,
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with two checkpoints, beside unrelated files."""
    beside = tmp_path_factory.mktemp("original")
    run = opened(beside / "run", [])
    assert run.folder is not None
    for step in range(1, STEPS[-1] + 1):
        run.folder.append(Record("train", step, 0, {"loss": 1 / step}, 2, 0.1, 0.5))
        if step in STEPS:
            run.save(state_at(step), position_at(step), {"batch": 2, "seconds_unrecorded": 0.5})
    run.finish(state_at(STEPS[-1]), position_at(STEPS[-1]), {"batch": 2})
    run.close()
    (beside / "outside.json").write_text('{"mine": 1}\n')
    return beside


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for starts on other hosts."""
    monkeypatch.setattr(lease, "EXPIRE_SECONDS", 0.0)


def listing(folder: Path) -> list[tuple[str, int, int, bytes]]:
    """Return names, times and contents of all that is beside the run."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.name != "run":
            entry = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found.append((path.name, entry.st_mtime_ns, entry.st_mode, content))
    return found


def check_opened(beside: Path, accept: bool) -> str:
    """Open the run and restore it; returns the outcome."""
    said, outcome = list[str](), "begun anew"
    before = listing(beside)
    try:
        run = opened(beside / "run", said, accept)
        try:
            if run.found is not None:
                batch = first_batch(SOURCE, run.found.position, run.found.extra)
                assert type(batch) is int
                assert batch >= 0
                restored = run.restore(abstract(state_at(0)))
                step = run.found.position.step
                outcome = {STEPS[0]: "older", STEPS[-1]: "newest"}[step]
                assert bits(restored) == bits(state_at(step))
                assert len(run.found.records) == run.found.position.records <= STEPS[-1]
                assert all(type(record) is Record for record in run.found.records)
            run.tell()
        finally:
            run.close()
    except ReplicaxError as error:
        said.append(str(error))
        outcome = "refused"
    for line in said:
        assert line.isprintable(), repr(line)
        assert line.strip()
    assert listing(beside) == before
    return outcome


def check_harmed(original: Path, tmp_path: Path, seeds: range) -> collections.Counter[str]:
    """Damage a copy for each of `seeds`; counts the outcomes."""
    found: collections.Counter[str] = collections.Counter()
    for seed in seeds:
        beside, chance = tmp_path / str(seed), random.Random(seed)
        shutil.copytree(original, beside)
        older, newest = (beside / f"run/checkpoints/{step}" for step in STEPS)
        for _ in range(chance.choice([1, 1, 2, 5])):
            corrupt(chance.choice([newest, newest, older, beside / "run"]), older, chance)
        found[check_opened(beside, chance.random() < 0.5)] += 1
        shutil.rmtree(beside)
    print(dict(found))
    return found


def test_no_harm_goes_unnoticed(original: Path, tmp_path: Path) -> None:
    check_harmed(original, tmp_path, range(FOLDERS))


@pytest.mark.parametrize("block", only((), range(1, 5), sampled=[1]))
def test_none_of_many_harms_goes_unnoticed(original: Path, tmp_path: Path, block: int) -> None:
    first = block * MANY_FOLDERS
    found = check_harmed(original, tmp_path, range(first, first + MANY_FOLDERS))
    assert set(found) == {"newest", "older", "begun anew", "refused"}
    assert sum(found.values()) == MANY_FOLDERS


def test_a_run_that_was_not_harmed_goes_on(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "copy")
    said: list[str] = []
    run = opened(tmp_path / "copy" / "run", said)
    run.close()
    assert run.found is not None
    assert run.found.position.step == STEPS[-1]
    assert len(said) == 1
    assert check_opened(tmp_path / "copy", accept=False) == "newest"

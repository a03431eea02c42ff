"""A run's folder with random damage: the right arrays, or one clear line."""

import collections
import random
import shutil
from pathlib import Path

import pytest
from chaos.runs.corruption import corrupt
from support.small_files import make_run, outcome, state_at
from support.tiers import only

from replicax.train.files.fingerprint import sha256
from replicax.train.files.records import Record

FOLDERS, MANY_FOLDERS = 60, 250
STEPS = (2, 4)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run with two checkpoints, beside unrelated files."""
    beside = tmp_path_factory.mktemp("original")
    make_run(beside / "run", STEPS)
    (beside / "outside.json").write_text('{"mine": 1}\n')
    return beside


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
    before = listing(beside)
    found = outcome(beside / "run", accept)
    assert listing(beside) == before
    assert found.fault is None
    if "opened" not in found.read:
        return "refused"
    if "found" not in found.read:
        return "begun anew"
    position, _, records = found.read["found"]
    assert type(found.read["batch"]) is int
    assert found.read["batch"] >= 0
    assert found.read["state"] == sha256(state_at(position.step))
    assert len(records) == position.records <= STEPS[-1]
    assert all(type(record) is Record for record in records)
    return {STEPS[0]: "older", STEPS[-1]: "newest"}[position.step]


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


@pytest.mark.promise("checkpoints.no-damage-passes")
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
    found = outcome(tmp_path / "copy" / "run")
    assert found.read["found"][0].step == STEPS[-1]
    assert len(found.said) == 1
    assert check_opened(tmp_path / "copy", accept=False) == "newest"

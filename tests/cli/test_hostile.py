"""Hostile run folders, configurations and command lines: one line, and a documented exit code."""

from pathlib import Path

import pytest
from support.hostile import make_run, trial

from replicax.train.files import lease


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    make_run(folder)
    return folder


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for starts on other hosts."""
    monkeypatch.setattr(lease, "EXPIRE_SECONDS", 0.5)


@pytest.mark.promise("outside.hostile-input")
@pytest.mark.parametrize(("kind", "trials"), [("folder", 6), ("config", 6), ("command line", 6)])
def test_hostile_input_is_one_line(kind: str, trials: int, original: Path, tmp_path: Path) -> None:
    found = (trial(kind, seed, original, tmp_path / "at") for seed in range(trials))
    assert [wrong for wrong in found if wrong] == []


@pytest.mark.exhaustive
def test_so_are_environments(original: Path, tmp_path: Path) -> None:
    assert [trial("environment", seed, original, tmp_path / "at") for seed in range(4)] == [
        None
    ] * 4

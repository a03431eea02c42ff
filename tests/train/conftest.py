"""A run's folder, a start that holds its lease, a step on two devices, and killed runs."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from support.lease_starts import HOLDS, Start
from support.resumable import Killed, crashing, data_parallel, fit

import replicax as rx
from replicax.train.files import lease


@pytest.fixture(scope="module", autouse=True)
def _no_repository() -> Iterator[None]:
    """Each start asks git for the commit, which here takes a tenth of a short run's time."""
    with mock.patch.dict(os.environ, {"GIT_DIR": os.devnull}):
        yield


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "x"


@pytest.fixture
def holding(run: Path) -> Iterator[Start]:
    start = Start(HOLDS, run)
    assert start.line() == "1"
    yield start
    start.end()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats every 20 ms, a check every 50 ms, and a start is dead after half a second."""
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.02)
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(lease, "EXPIRE_SECONDS", 0.5)


@pytest.fixture(scope="module")
def dp() -> rx.DataParallel:
    """A step on two devices; one for all tests of a file, so that it is compiled once."""
    return data_parallel(2)


@pytest.fixture(scope="module")
def killed(dp: rx.DataParallel, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Make a copy of a run that was killed after `at` steps, and saved every third."""
    folder = tmp_path_factory.mktemp("killed")

    def copy(to: Path, at: int) -> Path:
        original = folder / str(at)
        if not original.exists():
            with crashing(at):
                fit(dp, original, log_every=1)
        return Path(shutil.copytree(original, to))

    return copy

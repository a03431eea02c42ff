"""A run's folder, a start that holds its lease, and a step on eight devices."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.lease_starts import HOLDS, Start
from support.resumable import data_parallel

import replicax as rx
from replicax.train import lease


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
    """A step on eight devices; one for all tests of a file, so that it is compiled once."""
    return data_parallel(8)

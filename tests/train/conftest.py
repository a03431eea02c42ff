"""Fixtures for a run's folder, and for a start that holds its lease."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.lease_starts import HOLDS, Start

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

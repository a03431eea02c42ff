"""Dealing out cores."""

import os
from pathlib import Path

import pytest

from replicax.errors import ConfigError
from replicax.launch import process
from replicax.launch.process import core_blocks

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no cores to give out")


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores of two threads each: core 0 has the threads 0 and 4."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(process, "TOPOLOGY", tmp_path)
    for core in range(8):
        folder = tmp_path / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 4},{core % 4 + 4}\n")


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(
    ("processes", "blocks"),
    [
        (1, [(0, 4, 1, 5, 2, 6, 3, 7)]),
        (2, [(0, 4, 1, 5), (2, 6, 3, 7)]),
        (3, [(0, 4), (1, 5), (2, 6)]),
        (8, [(0,), (4,), (1,), (5,), (2,), (6,), (3,), (7,)]),
    ],
)
def test_blocks_are_equal_and_keep_threads_of_a_core_together(
    processes: int, blocks: list[tuple[int, ...]]
) -> None:
    assert core_blocks(processes) == blocks


def test_a_system_without_affinity_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ConfigError, match=r"--pin\b.*leave it\b"):
        core_blocks(1)

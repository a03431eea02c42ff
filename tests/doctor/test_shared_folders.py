"""Folders that a run writes to, and whether all processes share them."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from replicax.doctor import shared_folders
from replicax.doctor.shared_folders import check_folders, judge_folder
from replicax.text.checks import FAIL, NOTE, PASS

SEEN = shared_folders._Seen("/shared", "node0", True, None, 50 * 10**9, sees_token=True)


def other(**changed: Any) -> shared_folders._Seen:
    return dataclasses.replace(SEEN, **changed)


def test_processes_of_one_host_share(together: Any, folder: Path) -> None:
    for here, _, data in together(3, lambda peers: check_folders(peers, [str(folder)])):
        assert (here.verdict, data.verdict) == (PASS, PASS)
        assert re.search(r"the same\b.*3 processes .*this one\b.*host", data.found)
    assert list(folder.iterdir()) == []


def test_a_process_that_looks_elsewhere(
    together: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folders, "_SEE_SECONDS", 0.1)
    for name in ("0", "1"):
        (folder / name).mkdir()
    rows = together(2, lambda peers: check_folders(peers, [str(folder / str(peers.process))])[-1])
    for row in rows:
        assert row.verdict == FAIL
        assert re.search(r"process 1 does not\b.*process 0", row.found)
        assert str(folder / "1") in row.found
        assert "same folder" in row.cause
    assert not any(path.is_file() for path in folder.rglob("*"))


@pytest.mark.parametrize(("is_named", "verdict"), [(True, FAIL), (False, NOTE)])
def test_a_folder_of_each_host(is_named: bool, verdict: str) -> None:
    seen = [SEEN, other(host="node1", sees_token=False), other(host="node1", sees_token=False)]
    (row,) = judge_folder("/shared", seen, is_named=is_named)
    assert row.verdict == verdict
    assert re.search(r"processes 1 and 2 do not\b.*process 0", row.found)
    assert re.search(r"all hosts\b.*share", row.cause)


def test_a_folder_that_hosts_share() -> None:
    (row,) = judge_folder("/shared", [SEEN, other(host="node1")], is_named=True)
    assert row.verdict == PASS
    assert re.search(r"the same\b.*2 processes on .* 2 hosts$", row.found)


def test_a_process_that_may_not_write() -> None:
    trouble = "not writable (Read-only file system)"
    seen = [SEEN, other(trouble=trouble)]
    (row,) = judge_folder("runs", seen, is_named=False)
    assert row.verdict == FAIL
    assert f"process 1: {trouble}" in row.found


def test_little_room() -> None:
    (row,) = judge_folder("/shared", [SEEN, other(free_bytes=10**8)], is_named=True)
    assert row.verdict == NOTE
    assert "only 0.1 GB free" in row.found

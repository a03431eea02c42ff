"""The lease's files: full disks, removed folders, and files of other versions."""

import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from support.lease_starts import Watch, refused

from replicax.errors import CheckpointError, ConfigError, RunInUseError
from replicax.train.files.lease import take_lease


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(("module", "call"), [(os, "fsync"), (Path, "replace")])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str
) -> None:
    take_lease(run).release()
    before = sorted((run / "lease").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(module, call, full)
        with pytest.raises(ConfigError, match=rf"^\S+ .*written .{os.strerror(errno.ENOSPC)}"):
            take_lease(run)
    assert sorted((run / "lease").iterdir()) == before
    take_lease(run).release()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"written .{os.strerror(errno.ENOTDIR)}"):
        take_lease(tmp_path / "file" / "x")


def test_a_removed_or_replaced_folder_is_noticed(run: Path) -> None:
    first = take_lease(run)
    shutil.rmtree(run)
    with pytest.raises(RunInUseError, match="replaced"):
        first.check()
    with take_lease(run) as second:
        assert second.token == first.token == 1
        with pytest.raises(RunInUseError, match="replaced"):
            first.check()
        first.release()
        second.check()
        refused(run)


def test_a_folder_that_cannot_be_read_commits_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take_lease(run) as taken:
        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", full)
            with pytest.raises(CheckpointError, match=rf"read .{os.strerror(errno.ENOSPC)}"):
                taken.check()
        taken.check()


def test_a_failing_renewal_is_not_fatal(
    run: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def broken(*_: object) -> None:
        tried.set()
        full()

    monkeypatch.setattr(os, "utime", broken)
    with take_lease(run) as taken:
        assert tried.wait(5)
        tried.clear()
        assert tried.wait(5)
        taken.check()


def test_names_that_are_no_tokens_are_passed_over(run: Path) -> None:
    (run / "lease").mkdir(parents=True)
    names = ["7.json", "00000009.json.bak", "x", ".hidden", "-0000009.json", "00000009.JSON"]
    for name in names:
        (run / "lease" / name).touch()
    with take_lease(run) as taken:
        assert taken.token == 1
    assert {path.name for path in (run / "lease").iterdir()} > set(names)


def test_numbers_go_on_where_an_earlier_version_counted(run: Path) -> None:
    (run / "lease").mkdir(parents=True)
    for name in ("00000006.json", "00000006.released", f".00000001-{'0' * 16}.json"):
        (run / "lease" / name).touch()
    with take_lease(run) as taken:
        assert taken.token == 7
    for _ in range(2):
        take_lease(run).release()
    left = {path.name for path in (run / "lease").iterdir()}
    assert {name for name in left if "-" not in name} == {"00000006.json", "00000006.released"}
    assert not any(name.startswith(".") for name in left)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("content", [b"", b"\xff{"])
def test_a_newest_file_that_tells_nothing_is_waited_for(run: Path, content: bytes) -> None:
    (run / "lease").mkdir(parents=True)
    (run / "lease" / f"00000004-{'0' * 16}.json").write_bytes(content)
    with Watch() as watch, take_lease(run) as taken:
        assert taken.token == 5
    assert watch.seconds >= 0.5

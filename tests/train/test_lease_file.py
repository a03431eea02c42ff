"""The lease on storage that fails, lacks something, or holds junk."""

import errno
import fcntl
import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lease_starts import (
    Start,
    Watch,
    file_of,
    refused,
)

from replicax.errors import CheckpointError, ConfigError, RunInUseError
from replicax.train import lease, lease_file
from replicax.train.holder import Holder, parse_holder
from replicax.train.lease import take_lease


@pytest.mark.usefixtures("quick")
def test_without_locks_the_signs_of_life_decide(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    start = Start(
        "import fcntl\n"
        "def none(*_): raise OSError(37, 'No locks available')\n"
        "fcntl.lockf = none\nlease.RENEW_SECONDS = 0.02\n"
        "held = take_lease(folder, wait_seconds=1)\nprint('held', flush=True)\n"
        "sys.stdin.readline()",
        run,
    )
    try:
        assert start.line() == "held"
        assert f"pid {start.pid}" in refused(run, wait_seconds=20)
    finally:
        start.end()
    capsys.readouterr()
    with Watch() as watch, take_lease(run, wait_seconds=0.3) as taken:
        assert taken.token == 2
    assert watch.seconds >= 0.3
    assert "has no locks (No locks available)" in capsys.readouterr().err


def test_without_hard_links_a_number_is_still_given_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with take_lease(run) as taken:
        assert taken.token == 1
        assert lease_file.publish(run, 1) is None
        refused(run)
        taken.check()
        assert sorted(os.listdir(run / "lease")) == ["00000001.json"]


@pytest.mark.parametrize("call", ["link", "fsync", "listdir"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    take_lease(run).release()
    before = sorted((run / "lease").iterdir())
    turns = iter([False, True] if call == "listdir" else [True])  # once there is a file to leave
    real = getattr(os, call)

    def full(*arguments: Any) -> Any:
        if next(turns):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(ConfigError, match=r"^\S+ cannot be written \(No space left on device\)"):
        take_lease(run)
    monkeypatch.undo()
    assert sorted((run / "lease").iterdir()) == before
    take_lease(run).release()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written \(Not a directory\)"):
        take_lease(tmp_path / "file" / "x")


def test_a_lease_that_is_no_folder_is_refused(run: Path, tmp_path: Path) -> None:
    run.mkdir(parents=True)
    (run / "lease").touch()
    with pytest.raises(ConfigError, match="lease is no folder"):
        take_lease(run)
    (run / "lease").unlink()
    outside = tmp_path / "outside"
    outside.mkdir()
    for target in (outside, tmp_path / "nowhere"):
        (run / "lease").symlink_to(target)
        with pytest.raises(ConfigError, match="lease is no folder"):
            take_lease(run)
        (run / "lease").unlink()
    assert list(outside.iterdir()) == []


def test_a_removed_or_replaced_folder_is_noticed(run: Path) -> None:
    first = take_lease(run)
    shutil.rmtree(run)
    with pytest.raises(RunInUseError, match="folder was removed or replaced; this start stops"):
        first.check()
    with take_lease(run) as second:
        assert second.token == first.token == 1
        with pytest.raises(RunInUseError, match="folder was removed or replaced"):
            first.check()
        first.release()
        second.check()
        refused(run)


def test_a_folder_that_cannot_be_read_commits_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with take_lease(run) as taken:

        def broken(_: object) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(os, "listdir", broken)
            with pytest.raises(CheckpointError, match=r"cannot be read \(Input/output error\)"):
                taken.check()
        taken.check()


def test_a_failing_renewal_is_not_fatal(
    run: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = threading.Event()

    def broken(_: object) -> None:
        tried.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "utime", broken)
    with take_lease(run, wait_seconds=1) as taken:
        assert tried.wait(5)
        tried.clear()
        assert tried.wait(5)
        taken.check()


def test_names_that_are_no_tokens_are_passed_over(run: Path) -> None:
    (run / "lease").mkdir(parents=True)
    names = ["00000000.json", "7.json", "000000009.json", "00000009.json.bak", "x", ".hidden"]
    names += ["٠٠٠٠٠٠٠٩.json", "-0000009.json", "9" * 200 + ".json", "00000009.JSON", "a\nb"]
    for name in names:
        (run / "lease" / name).touch()
    with take_lease(run) as taken:
        assert taken.token == 1
        taken.check()
    assert {path.name for path in (run / "lease").iterdir()} > set(names)


def test_what_a_killed_taker_left_goes_after_an_hour(run: Path) -> None:
    (run / "lease").mkdir(parents=True)
    old, young = (run / "lease" / f".taking-{digit * 16}" for digit in "0a")
    for path in (old, young):
        path.touch()
    os.utime(old, (time.time() - 7200,) * 2)
    take_lease(run).release()
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize(
    "kind", ["empty", "huge", "deep", "folder", "pipe", "link", "dangling", "text"]
)
@pytest.mark.usefixtures("quick")
def test_a_newest_file_that_tells_nothing_is_waited_for(
    run: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, outside = file_of(run, 4), tmp_path / "outside"
    path.parent.mkdir(parents=True)
    outside.write_bytes(Holder.this_process(4).to_json())
    before = outside.stat()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("link", "dangling"):
        path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    else:
        content = {
            "empty": b"",
            "huge": outside.read_bytes() + b" " * 10**6,
            "deep": b"[" * 4000,
            "text": b"\xff{",
        }
        path.write_bytes(content[kind])
    with Watch() as watch, take_lease(run, wait_seconds=0.2) as taken:
        assert taken.token == 5
        taken.check()
    assert watch.seconds >= 0.2
    assert "on an unknown host, may be alive" in capsys.readouterr().err
    assert (outside.stat().st_mtime_ns, outside.stat().st_ino) == (
        before.st_mtime_ns,
        before.st_ino,
    )
    assert {each.name for each in tmp_path.iterdir()} == {"runs", "outside"}


def test_a_number_once_given_back_is_not_given_out_again(run: Path) -> None:
    """Else a start would be born with its mark of release beside it."""
    (run / "lease").mkdir(parents=True)
    (run / "lease" / "00000007.released").touch()
    with take_lease(run) as taken:
        assert taken.token == 8
        refused(run)


def test_a_start_that_is_slow_does_not_count_backwards(run: Path) -> None:
    (run / "lease").mkdir(parents=True)
    (run / "lease" / "00000012.released").touch()
    assert lease_file.publish(run, 3) is None
    assert os.listdir(run / "lease") == ["00000012.released"]


def test_a_release_follows_no_link(run: Path, tmp_path: Path) -> None:
    with take_lease(run):
        (run / "lease" / "00000001.released").symlink_to(tmp_path / "outside")
    assert not (tmp_path / "outside").exists()


@pytest.mark.usefixtures("quick")
def test_the_last_number_is_one_line(run: Path) -> None:
    (run / "lease").mkdir(parents=True)
    (run / "lease" / "99999999.released").touch()
    take_lease(run).release()
    assert (run / "lease" / "100000000.released").exists()
    (run / "lease" / f"{10**12 - 1}.released").touch()
    with pytest.raises(ConfigError, match="999999999999 starts and no further"):
        take_lease(run)


def fields(**changes: Any) -> dict[str, Any]:
    return {**json.loads(Holder.this_process(1).to_json()), **changes}


def test_a_lease_file_says_who_holds_the_run(run: Path) -> None:
    with take_lease(run):
        content = json.loads(file_of(run, 1).read_bytes())
    assert content["token"] == 1
    assert content["host"] == os.uname().nodename
    assert content["pid"] == os.getpid()
    assert abs(content["started_at"] - time.time()) < 60
    read = parse_holder(json.dumps(content).encode(), 1)
    assert read is not None
    assert read.is_on_this_host
    assert read.is_running


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
contents = (
    st.binary(max_size=200)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(sorted(fields())), json_values).map(
        lambda changes: json.dumps(fields(**changes)).encode()
    )
)


@settings(max_examples=150, deadline=None)
@given(content=contents)
def test_whatever_a_lease_file_holds_the_run_is_taken_or_refused(content: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as parent:
        patch.setattr(lease, "RENEW_SECONDS", 0.001)
        patch.setattr(lease, "_LOOK_SECONDS", 0.001)
        run = Path(parent) / "x"
        file_of(run, 1).parent.mkdir(parents=True)
        file_of(run, 1).write_bytes(content)
        with take_lease(run, wait_seconds=0.002) as taken:
            assert taken.token == 2
            taken.check()
        assert file_of(run, 1).read_bytes() == content
        assert os.listdir(parent) == ["x"]
        assert os.listdir(run) == ["lease"]

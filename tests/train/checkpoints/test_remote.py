"""Checkpoints in an object store: complete once the manifest is there, read from a copy."""

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.figures import assert_mentions
from support.object_store import Objects, register
from support.processes import SUPPORT, run_job
from support.resumable import bits, settle
from support.saved_checkpoint import position_at, state_at

from replicax.core.ground.job import Alone
from replicax.core.ground.train_state import TrainState
from replicax.errors import CheckpointError
from replicax.train.checkpoints import store as module
from replicax.train.checkpoints.arrays import abstract, array_entries, read
from replicax.train.checkpoints.manifest import MANIFEST
from replicax.train.checkpoints.saver import Saver
from replicax.train.checkpoints.store import Store
from replicax.train.files.places import place


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """A store, and a separate folder for temporary files."""
    for name in ("objects", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield register(tmp_path / "objects")
    settle()


@pytest.fixture
def store(objects: Objects) -> Store:
    return opened()


def opened() -> Store:
    return Store(place("s3://bucket/run/checkpoints"), 2, None)


def saver(store: Store, token: int = 3, **settings: Any) -> Saver:
    return Saver(store, token, settings.pop("check", lambda: None), Alone(), 11, {}, **settings)


def save(saver: Saver, step: int) -> bool:
    saver.save(state_at(step), position_at(step), {"batch": step})
    return saver.wait()


def found(store: Store, said: list[str] | None = None) -> TrainState | None:
    """Restore the state of the newest good checkpoint."""
    good = store.newest_good(array_entries(state_at(0)), (said if said is not None else []).append)
    return good and read(abstract(state_at(0)), store.local(good[0]))


def keys(objects: Objects, name: str) -> list[Path]:
    """Files of the objects of that name, the oldest checkpoint first."""
    root = "bucket/run/checkpoints/"
    wanted = [key for key in objects.listed() if key.startswith(root) and key.endswith(f"/{name}")]
    return [objects._file(key) for key in wanted]


def test_a_step_saved_again_comes_after(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert save(saver(store, 3), 5)
    monkeypatch.setattr(store, "retire", lambda pinned: None)
    assert save(saver(store, 12), 5)
    assert [path.name for _, path in store.paths()] == [
        "step-000000005.3000001",
        "step-000000005.12000001",
    ]


def test_older_ones_go_and_pinned_ones_stay(store: Store, objects: Objects) -> None:
    several = saver(store, pinned=lambda: [1])
    for step in range(1, 6):
        assert save(several, step)
    assert [step for step, _ in store.paths()] == [1, 4, 5]
    assert {key.split("/")[3].partition(".")[0] for key in objects.listed()} == {
        f"step-{step:09d}" for step in (1, 4, 5)
    }


@pytest.mark.parametrize("killed_in", ["upload", "commit"])
def test_a_kill_before_the_manifest_leaves_no_checkpoint(
    store: Store, objects: Objects, monkeypatch: pytest.MonkeyPatch, killed_in: str
) -> None:
    assert save(saver(store), 1)
    before = objects.listed()
    copy = module.copy_files

    def half(first: Any, target: Path, paths: Any) -> None:
        if killed_in == "upload":
            copy(first, target, list(paths)[::2])
        raise SystemExit

    with monkeypatch.context() as patch:
        if killed_in == "upload":
            patch.setattr(module, "copy_files", half)
        else:
            patch.setattr(module.RemoteStore, "commit", half)
        killed = saver(store, 4)
        killed.save(state_at(2), position_at(2), {})
        assert killed._thread is not None
        killed._thread.join()
    assert objects.listed() != before
    again = opened()
    assert [step for step, _ in again.paths()] == [1]
    again.clean()
    assert objects.listed() == before
    assert bits(found(again)) == bits(state_at(1))


def flip(file: Path) -> None:
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


@pytest.mark.parametrize(
    ("harm", "name", "reason"),
    [
        (flip, "default/_METADATA", "checksum"),
        (Path.unlink, "default/_METADATA", "is missing"),
        (flip, MANIFEST, "damaged"),
    ],
)
def test_a_damaged_checkpoint_is_set_aside(
    store: Store, objects: Objects, harm: Any, name: str, reason: str
) -> None:
    several = saver(store)
    for step in (1, 2):
        assert save(several, step)
    harm(keys(objects, name)[-1])
    said: list[str] = []
    again = opened()
    assert bits(found(again, said)) == bits(state_at(1))
    assert len(said) == 1
    assert reason in said[0]
    assert "(set aside" in said[0]
    assert said[0].endswith(f" step-000000002.3000002/refused-{MANIFEST})")
    again.clean()
    assert len(keys(objects, f"refused-{MANIFEST}")) == 1


def test_a_store_that_fails_sets_nothing_aside(
    store: Store, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert save(saver(store), 1)

    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    with monkeypatch.context() as patch:
        patch.setattr(Objects, "_open", broken)
        with pytest.raises(OSError, match="timed out"):
            found(opened())
        with pytest.raises(CheckpointError, match=r"read .*timed out"):
            store.local(store.paths()[0][1])
    assert bits(found(opened())) == bits(state_at(1))


def test_a_save_that_fails_is_told_and_the_next_is_tried(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    several = saver(store)
    with monkeypatch.context() as patch:

        def broken(*_: object) -> None:
            raise OSError(errno.EIO, "503: slow down")

        patch.setattr(module, "copy_files", broken)
        assert not save(several, 1)
    (alarm,) = several.poll()
    assert_mentions(alarm, "save has", "failed (1 in", "row): 503: slow down; no step")
    assert save(several, 2)
    assert bits(found(opened())) == bits(state_at(2))
    assert os.listdir(tmp_path / "temporary") == []


def test_each_process_uploads_and_downloads_its_own(tmp_path: Path) -> None:
    (tmp_path / "objects").mkdir()
    for ended in run_job(SUPPORT / "job_remote.py", tmp_path / "objects", processes=2):
        assert ended.code == 0, ended.err
        assert ended.out.splitlines()[-1] == "equal"
    uploaded = register(tmp_path / "objects").listed()
    chunks = [key for key in uploaded if "/params.split/" in key and key[-1].isdigit()]
    assert len(chunks) == 2

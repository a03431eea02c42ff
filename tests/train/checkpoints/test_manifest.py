"""The manifest is read as it was written, and refused if a byte has changed."""

import dataclasses
import errno
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from support.figures import assert_mentions
from support.saved_checkpoint import manifest

from replicax.errors import CheckpointError
from replicax.train.checkpoints.manifest import (
    MANIFEST,
    ArrayEntry,
    FileEntry,
    Manifest,
    Position,
    read_manifest,
    write_manifest,
)
from replicax.train.files.sealed import sealed

AS_WRITTEN = (
    '{"arrays":{"step":{"dtype":"int32","shape":[]}},'
    '"checksum":"59d518f801dad7bfe9221f3f0b7357856f38939007c63d715eafbf9c3f077279",'
    '"config":{"name":"\\u00e9"},"extra":{},"files":{"state/step/0":{"bytes":4,"sha256":["'
    + "ab"
    * 32
    + '"]}},"format":2,"position":{"bad_steps":0,"epoch":0,"evaluated_step":0,"records":1,"rows":8,'
    '"rows_trained":8,"rows_unrecorded":8,"step":3},"saved_at":1763740800.25,"seed":7,"token":2}\n'
)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    """A manifest, as it is on disk."""
    write_manifest(tmp_path, manifest())
    return (tmp_path / MANIFEST).read_bytes()


def refusal(folder: Path, data: str | bytes) -> str:
    """Return why a manifest of `data` is refused; one line that fits a message."""
    (folder / MANIFEST).write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(CheckpointError) as refused:
        read_manifest(folder)
    reason = str(refused.value)
    assert reason.isprintable()
    assert len(reason) < 400
    return reason


def test_what_is_on_disk_is_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(AS_WRITTEN)
    assert read_manifest(tmp_path) == Manifest(
        position=Position(3, 0, 8, 0, 8, 8, 1, 0),
        token=2,
        saved_at=1763740800.25,
        seed=7,
        arrays={"step": ArrayEntry("int32", ())},
        files={"state/step/0": FileEntry(4, ("ab" * 32,))},
        config={"name": "é"},
        extra={},
    )


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Manifest)])
def test_a_sealed_manifest_without_a_field_is_refused(name: str, tmp_path: Path) -> None:
    content = {"format": 2, **dataclasses.asdict(manifest())}
    del content[name]
    assert_mentions(refusal(tmp_path, sealed(content)), name)


def test_it_is_on_disk_once_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    fsync = os.fsync

    def noted(file: int) -> None:
        status = os.fstat(file)
        synced.append((stat.S_ISDIR(status.st_mode), status.st_size))
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    write_manifest(tmp_path, manifest())
    (is_folder, size), (then_folder, _) = synced
    assert (is_folder, then_folder) == (False, True)
    assert size == (tmp_path / MANIFEST).stat().st_size


@pytest.mark.parametrize(
    "changes",
    [
        {"config": {"learning_rate": float("nan")}},
        {"config": {"path": Path("data")}},
        {"config": {1: "one", "1": "one more"}},
        {"saved_at": float("inf")},
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=MANIFEST):
        write_manifest(tmp_path, manifest(**changes))
    assert not any(tmp_path.iterdir())


def test_where_it_is_not_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"written .*{os.strerror(errno.ENOENT)}"):
        write_manifest(tmp_path / "gone", manifest())
    with pytest.raises(CheckpointError, match=r"manifest\.json .*missing"):
        read_manifest(tmp_path / "gone")
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(
        CheckpointError, match=rf"manifest\.json .*read .*{os.strerror(errno.EISDIR)}"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe{}", b"{", b"[]", b"1", b'{"format":2}'])
def test_what_is_no_manifest_is_refused(tmp_path: Path, data: bytes) -> None:
    assert_mentions(refusal(tmp_path, data), "manifest.json", "damaged")


def test_a_later_format_is_told_from_damage(tmp_path: Path, whole: bytes) -> None:
    later = whole.replace(b'"format":2', b'"format":3')
    reason = r"^manifest\.json .*\b3;.*\b2: upgrade\b"
    assert re.search(reason, refusal(tmp_path, later))

"""Checksums: of every byte, by pieces."""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.figures import assert_mentions

from replicax.errors import CheckpointError
from replicax.train.checkpoints import manifest
from replicax.train.checkpoints.manifest import PIECE_BYTES, FileEntry, check_files, file_entries

TEXTS = {"a/b/0.0": b"chunk", "a/b/.zarray": b"{}", "empty": b"", "a/c/0": b"x" * 4096}


def first_difference(folder: Path, files: dict[str, FileEntry]) -> str | None:
    try:
        return check_files(folder, files)
    except CheckpointError as error:
        return str(error)


def assert_bytes_differ(found: str | None, path: str, span: str) -> None:
    assert re.search(f"^{path} .*checksum.* bytes {span}$", str(found))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A few small files, in a folder of a folder."""
    inside = tmp_path / "1"
    for path, text in TEXTS.items():
        (inside / path).parent.mkdir(parents=True, exist_ok=True)
        (inside / path).write_bytes(text)
    return inside


def sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def test_a_large_file_has_a_checksum_for_each_piece(tmp_path: Path) -> None:
    file, size = tmp_path / "large", 2 * PIECE_BYTES + 5
    with file.open("wb") as large:
        large.truncate(size)
        large.seek(PIECE_BYTES - 1)
        large.write(b"ab")
        large.seek(size - 1)
        large.write(b"z")
    zeros = bytes(PIECE_BYTES - 1)
    pieces = (sha256(zeros + b"a"), sha256(b"b" + zeros), sha256(b"\0\0\0\0z"))
    entries = file_entries(tmp_path)
    assert entries == {"large": FileEntry(size, pieces)}
    for position, span in (
        (0, "0 to 67108864"),
        (PIECE_BYTES, "67108864 to 134217728"),
        (size - 1, "134217728 to 134217733"),
    ):
        flip(file, position)
        assert_bytes_differ(first_difference(tmp_path, entries), "large", span)
        flip(file, position)


def flip(file: Path, position: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 1]))


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda folder: flip(folder / "a/c/0", 4095), r"^a/c/0 .*\bbytes 0 to 4096$"),
    "deleted": (lambda folder: (folder / "a/c/0").unlink(), "a/c/0 is missing"),
    "truncated": (lambda folder: os.truncate(folder / "a/c/0", 12), r"^a/c/0 .*\b12\b.*\b4096\b"),
    "grown": (lambda folder: os.truncate(folder / "empty", 1), r"^empty .*\b1\b.*\b0\b"),
    "extra": (lambda folder: (folder / "a/x").write_bytes(b""), "a/x is not in the manifest"),
    "another manifest": (
        lambda folder: (folder / "a/manifest.json").write_text("{}"),
        "a/manifest.json is not in the manifest",
    ),
    "folder for a file": (
        lambda folder: ((folder / "empty").unlink(), (folder / "empty").mkdir()),
        "empty is missing",
    ),
    "pipe": (
        lambda folder: ((folder / "empty").unlink(), os.mkfifo(folder / "empty")),
        r"^empty .*regular file$",
    ),
    "not there": (
        lambda folder: folder.rename(folder.with_name("elsewhere")),
        r"^1 .*\(No such file or directory\)$",
    ),
}


@pytest.mark.parametrize(("harm", "line"), HARM.values(), ids=HARM.keys())
def test_what_is_different_is_named(
    folder: Path, harm: Callable[[Path], object], line: str
) -> None:
    entries = file_entries(folder)
    harm(folder)
    assert re.search(line, str(first_difference(folder, entries)))


def test_a_failing_disk_is_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = file_entries(folder)
    (folder / "a/b/.zarray").unlink()
    # An address that no process has reads like a bad sector.
    monkeypatch.setattr(manifest, "_sizes", lambda folder: {"a/b/.zarray": 2})
    (folder / "a/b/.zarray").symlink_to("/proc/self/mem")
    line = "a/b/.zarray cannot be read (Input/output error)"
    assert first_difference(folder, {"a/b/.zarray": entries["a/b/.zarray"]}) == line
    with pytest.raises(CheckpointError) as refused:
        file_entries(folder)
    assert str(refused.value) == line


def test_a_file_that_shrinks_meanwhile_is_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = file_entries(folder)
    sizes = {path: entry.bytes for path, entry in entries.items()}
    monkeypatch.setattr(manifest, "_sizes", lambda folder: sizes)
    os.truncate(folder / "a/c/0", 12)
    found = first_difference(folder, entries)
    assert found.startswith("a/c/0 ")
    assert_mentions(found, "truncated", "12 bytes")

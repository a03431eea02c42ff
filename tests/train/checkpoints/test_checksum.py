"""Checksums: of every byte, by pieces."""

import dataclasses
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


def test_every_file_is_described(folder: Path) -> None:
    expected = {path: FileEntry(len(text), (sha256(text),)) for path, text in TEXTS.items()}
    assert file_entries(folder) == expected
    assert list(file_entries(folder)) == sorted(TEXTS)
    assert first_difference(folder, expected) is None


def test_more_files_than_a_thread_takes_at_once(tmp_path: Path) -> None:
    texts = {f"{number % 7}/{number}": bytes([number % 251]) * number for number in range(300)}
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(text)
    entries = file_entries(tmp_path)
    assert {path: entry.sha256 for path, entry in entries.items()} == {
        path: (sha256(text),) for path, text in texts.items()
    }
    for number in (1, 150, 299):
        path = f"{number % 7}/{number}"
        (tmp_path / path).write_bytes(b"\xff" * number)
        assert_bytes_differ(first_difference(tmp_path, entries), path, f"0 to {number}")
        (tmp_path / path).write_bytes(texts[path])


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


def test_a_file_of_exactly_one_piece_has_one_checksum(tmp_path: Path) -> None:
    (tmp_path / "piece").touch()
    os.truncate(tmp_path / "piece", PIECE_BYTES)
    entries = file_entries(tmp_path)
    assert entries["piece"].sha256 == (sha256(bytes(PIECE_BYTES)),)


def flip(file: Path, position: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(position)
        byte = opened.read(1)[0]
        opened.seek(position)
        opened.write(bytes([byte ^ 1]))


def test_the_manifest_is_no_part_of_what_it_describes(folder: Path) -> None:
    entries = file_entries(folder)
    (folder / "manifest.json").write_text("{}")
    assert file_entries(folder) == entries
    assert first_difference(folder, entries) is None
    (folder / "a" / "manifest.json").write_text("{}")
    assert "a/manifest.json" in file_entries(folder)
    found = first_difference(folder, entries)
    assert found.startswith("a/manifest.json ")
    assert "not in" in found


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (lambda folder: flip(folder / "a/c/0", 4095), r"^a/c/0 .*\bbytes 0 to 4096$"),
    "deleted": (lambda folder: (folder / "a/c/0").unlink(), "a/c/0 is missing"),
    "truncated": (lambda folder: os.truncate(folder / "a/c/0", 12), r"^a/c/0 .*\b12\b.*\b4096\b"),
    "grown": (lambda folder: os.truncate(folder / "empty", 1), r"^empty .*\b1\b.*\b0\b"),
    "extra": (lambda folder: (folder / "a/x").write_bytes(b""), "a/x is not in the manifest"),
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


def test_a_file_that_should_not_be_empty_of_checksums(folder: Path) -> None:
    entries = file_entries(folder)
    entries["a/c/0"] = dataclasses.replace(entries["a/c/0"], sha256=(sha256(b""),))
    assert_bytes_differ(first_difference(folder, entries), "a/c/0", "0 to 4096")


def test_sizes_are_looked_at_before_a_file_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = file_entries(folder)
    flip(folder / "a/b/0.0", 0)
    os.truncate(folder / "empty", 7)

    def never(folder: Path, piece: tuple[str, int, int]) -> str:
        raise AssertionError(f"{piece[0]} was opened")

    monkeypatch.setattr(manifest, "_digest", never)
    assert re.search(r"^empty .*\b7\b.*\b0\b", str(first_difference(folder, entries)))


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


def test_no_descriptor_is_left_open(folder: Path) -> None:
    entries = file_entries(folder)
    before = os.listdir("/proc/self/fd")
    first_difference(folder, entries)
    flip(folder / "a/b/0.0", 0)
    first_difference(folder, entries)
    (folder / "a/c/0").unlink()
    (folder / "a/c/0").symlink_to("x")
    first_difference(folder, entries)
    assert os.listdir("/proc/self/fd") == before

"""The manifest: read back as it was written, and refused where one byte is another."""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.saved_checkpoint import manifest
from support.tiers import EXHAUSTIVE

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

MUTATIONS, MANY_MUTATIONS = 200, 10_000
LARGEST = 2**63 - 1


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every example writes to anew."""
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def whole(place: Path) -> bytes:
    """A manifest, as it is on disk."""
    write_manifest(place, manifest())
    return (place / MANIFEST).read_bytes()


def written(folder: Path) -> dict[str, Any]:
    """What is in a manifest of `folder`, without its checksum."""
    write_manifest(folder, manifest())
    content: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    del content["checksum"]
    return content


def signed(content: dict[str, Any]) -> str:
    """As anyone can sign who has read the source."""

    def canonical(value: Any) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    checksum = hashlib.sha256(canonical(content).encode()).hexdigest()
    return canonical({**content, "checksum": checksum}) + "\n"


def refusal(folder: Path, data: str | bytes) -> str:
    """Why a manifest of `data` is not read; one line that fits a message."""
    (folder / MANIFEST).write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(CheckpointError) as refused:
        read_manifest(folder)
    reason = str(refused.value)
    assert reason.isprintable()
    assert len(reason) < 400
    return reason


def test_it_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest())
    assert read_manifest(tmp_path) == manifest()
    assert manifest().nbytes == 48 + 2**26 + 1


def test_it_is_json_that_anyone_can_check(tmp_path: Path) -> None:
    content = written(tmp_path)
    assert content["format"] == 1
    assert content["position"] == dataclasses.asdict(manifest().position)
    assert content["arrays"]["params.w"] == {"dtype": "float32", "shape": [3, 4]}
    assert (tmp_path / MANIFEST).read_text() == signed(content)


def test_limits_are_within(tmp_path: Path) -> None:
    largest = Position(**{field.name: LARGEST for field in dataclasses.fields(Position)})
    edge = manifest(
        position=largest,
        token=LARGEST,
        seed=LARGEST,
        saved_at=0.0,
        arrays={"é" * 127: ArrayEntry("int8", (LARGEST, 1)), "none": ArrayEntry("int8", (0, 9))},
        files={"/".join(["d" * 255] * 16): FileEntry(0, ("00" * 32,))},
    )
    write_manifest(tmp_path, edge)
    assert read_manifest(tmp_path) == edge


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
        {"seed": -1},
        {"token": True},
        {"arrays": {"a/b": ArrayEntry("float32", ())}},
        {"arrays": {"w": ArrayEntry("object", ())}},
        {"files": {"../x": FileEntry(0, ("00" * 32,))}},
        {"files": {"x": FileEntry(0, ())}},
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=MANIFEST):
        write_manifest(tmp_path, manifest(**changes))
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be written \(No such file or directory\)"):
        write_manifest(tmp_path / "gone", manifest())
    with pytest.raises(CheckpointError, match="gone is missing"):
        read_manifest(tmp_path / "gone")


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    folder.mkdir()
    outside.write_text("precious")
    (folder / MANIFEST).symlink_to(outside)
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_manifest(folder, manifest())
    assert outside.read_text() == "precious"


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / MANIFEST
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        read_manifest(tmp_path)
    write_manifest(tmp_path, manifest())
    kept = file.rename(tmp_path / "kept")
    makers: list[Callable[[], None]] = [
        lambda: file.symlink_to(kept),
        lambda: file.mkdir(),
        lambda: os.mkfifo(file),
    ]
    for make in makers:
        make()
        with pytest.raises(CheckpointError, match=r"manifest\.json is no regular file"):
            read_manifest(tmp_path)
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()


def test_a_linked_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write_manifest(tmp_path / "real", manifest())
    (tmp_path / "step-1").symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointError, match="step-1 is no folder"):
        read_manifest(tmp_path / "step-1")


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest())
    os.truncate(tmp_path / MANIFEST, 64 * 2**20 + 1)
    with pytest.raises(CheckpointError, match="67108865 bytes; at most 67108864"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe{}", "not UTF-8 at byte 0"),
        (b"\xef\xbb\xbf{}", "no JSON"),
        (b"\x80\x04cposix\nsystem\n(S'true'\ntR.", "not UTF-8"),
        (b"{", "no JSON"),
        (b"[]", "no format number"),
        (b"1", "no format number"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"format":1,"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"format":1,"format":1}', "the key format is there twice"),
        (b'{"format":1,"a":{"b\\n":1,"b\\n":2}}', "the key 'b\\n' is there twice"),
        (b'{"format":1,"a":NaN}', "NaN is no number"),
        (b'{"format":1,"a":-Infinity}', "-Infinity is no number"),
        (b'{"format":1,"a":1e999}', "1e999 is no finite number"),
        (b'{"format":1,"a":' + b"9" * 5000 + b"}", "no strict JSON"),
        (b'{"format":true}', "no format number"),
        (b'{"format":1.0}', "no format number"),
        (b'{"format":2}', "format 2; this Replicax reads format 1: upgrade it"),
        (b'{"format":1}', "does not match its own checksum"),
        (b'{"format":1,"checksum":[]}', "does not match its own checksum"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, data: bytes, reason: str) -> None:
    assert reason in refusal(tmp_path, data)


def test_another_checksum_is_refused(tmp_path: Path) -> None:
    text = signed(written(tmp_path))
    assert "does not match its own checksum" in refusal(tmp_path, text.replace(":120", ":121"))


def test_the_same_in_other_bytes_is_refused(tmp_path: Path) -> None:
    text = signed(written(tmp_path))
    spaced = json.dumps(json.loads(text), sort_keys=True)
    for other in (text + " ", text[:-1], spaced, text.replace("\\u00e9", "é")):
        assert other != text
        assert "in other bytes" in refusal(tmp_path, other)


def replaced(content: Any, keys: tuple[str, ...], value: Any) -> Any:
    *above, last = keys
    inner = content
    for key in above:
        inner = inner[key]
    inner[last] = value
    return content


W, FILE = ("arrays", "params.w"), ("files", "state/params.w/0.0")


@pytest.mark.parametrize(
    ("keys", "value", "reason"),
    [
        *[
            (("position", "step"), value, "position.step: ")
            for value in (True, -1, 2**63, 1.0, "1", None, [], 10**4000)
        ],
        (("position",), {}, "position: bad_steps is missing"),
        (("position", "more"), 1, "position: nothing is known of more"),
        (("position",), [], "position: it is no JSON object"),
        (("more\x1b[2J",), 1, "nothing is known of 'more\\x1b[2J'"),
        (("token",), -1, "token: "),
        (("seed",), 0.5, "seed: "),
        *[(("saved_at",), value, "saved_at: ") for value in (1, -1.0, "1", True, None)],
        (("arrays",), [], "arrays: it is no JSON object"),
        (("config",), [], "config: it is no JSON object"),
        (("extra",), None, "extra: it is no JSON object"),
        (W, [], "params.w: it is no JSON object"),
        *[((*W, "dtype"), name, "no dtype") for name in ("O", "<f4", "f4", "", "object", 4, None)],
        *[((*W, "shape"), shape, "a shape is") for shape in ({}, "34", None, [1] * 33)],
        *[((*W, "shape"), [dim], "a dim of") for dim in (-1, True, 1.0, "3", 2**63, [3])],
        ((*W, "shape"), [2**31, 2**31, 2], "is larger than"),
        ((*W, "more"), 1, "nothing is known of more"),
        ((*FILE, "bytes"), -1, "no whole number"),
        ((*FILE, "bytes"), 2**26 + 1, "take 2 checksums"),
        ((*FILE, "bytes"), 2**63 - 1, "checksums, in a list"),
        *[((*FILE, "sha256"), value, "checksum") for value in ([], "ab" * 32, {}, None)],
        *[
            ((*FILE, "sha256"), [digest], "64 lower-case hexadecimal digits")
            for digest in ("AB" * 32, "ab" * 31, "ab" * 33, "ab" * 32 + "\n", "gg" * 32, 1, None)
        ],
        *[
            (("files", path), {"bytes": 0, "sha256": ["00" * 32]}, "the file ")
            for path in (
                *("", "/", "/etc/passwd", "..", "../x", "state/../../x", "state//x", "./x"),
                *("x/", "state/.", "a\\b", "a\0b", "\ud800", "x" * 256, "é" * 128, "a/" * 16 + "a"),
                MANIFEST,
            )
        ],
        *[
            (("arrays", name), {"dtype": "int8", "shape": []}, "the array ")
            for name in ("", ".", "..", "a/b", "/a", "a\\b", "a\0b", "\udc80", "x" * 256)
        ],
    ],
)
def test_what_is_signed_is_not_trusted_either(
    tmp_path: Path, keys: tuple[str, ...], value: Any, reason: str
) -> None:
    text = signed(replaced(written(tmp_path), keys, value))
    assert reason in refusal(tmp_path, text)


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(Manifest)])
def test_every_field_must_be_there(tmp_path: Path, key: str) -> None:
    content = written(tmp_path)
    del content[key]
    assert f"{key} is missing" in refusal(tmp_path, signed(content))


@st.composite
def other_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` after a few edits: bits flipped, spans taken out, doubled or put in."""
    edited = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(edited)))
        end = min(len(edited), start + draw(st.integers(0, 40)))
        match draw(st.sampled_from(["flip", "cut", "double", "insert", "end"])):
            case "flip" if start < len(edited):
                edited[start] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del edited[start:end]
            case "double":
                edited[start:start] = edited[start:end]
            case "insert":
                edited[start:start] = draw(st.binary(min_size=1, max_size=6))
            case "end":
                del edited[start:]
    return bytes(edited)


HOSTILE = st.one_of(
    st.sampled_from([-1, 2**63, 2**64, 10**300, 0.5, -0.0, 1e308, True, None, "", "..", "\0", "é"]),
    st.integers(),
    st.text(max_size=8),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=6,
    ),
)


@st.composite
def other_structure(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` with one value of it replaced, removed, renamed or joined by another, and signed."""
    content = json.loads(data)
    del content["checksum"]
    inner = content
    while True:
        keys = list(range(len(inner))) if isinstance(inner, list) else sorted(inner)
        key = draw(st.sampled_from(keys)) if keys else None
        if key is None or not isinstance(inner[key], dict | list) or draw(st.booleans()):
            break
        inner = inner[key]
    match draw(st.sampled_from(["replace", "remove", "rename", "join"])):
        case "replace" if key is not None:
            inner[key] = draw(HOSTILE)
        case "remove" if key is not None:
            del inner[key]
        case "rename" if isinstance(inner, dict) and key is not None:
            inner[draw(st.text(max_size=8))] = inner.pop(key)
        case _ if isinstance(inner, dict):
            inner[draw(st.text(max_size=8))] = draw(HOSTILE)
        case _:
            inner.append(draw(HOSTILE))
    return signed(content).encode()


def check_bytes(place: Path, whole: bytes, data: st.DataObject) -> None:
    mutated = data.draw(other_bytes(whole))
    if mutated == whole:
        (place / MANIFEST).write_bytes(mutated)
        assert read_manifest(place) == manifest()
    else:
        refusal(place, mutated)


def check_structure(place: Path, whole: bytes, data: st.DataObject) -> None:
    mutated = data.draw(other_structure(whole))
    (place / MANIFEST).write_bytes(mutated)
    try:
        understood = read_manifest(place)
    except CheckpointError:
        return
    write_manifest(place, understood)
    assert (place / MANIFEST).read_bytes() == mutated


@settings(max_examples=MUTATIONS, deadline=None)
@given(st.data())
def test_other_bytes_are_refused(place: Path, whole: bytes, data: st.DataObject) -> None:
    check_bytes(place, whole, data)


@settings(max_examples=MUTATIONS, deadline=None)
@given(st.data())
def test_another_structure_is_refused_or_means_what_it_says(
    place: Path, whole: bytes, data: st.DataObject
) -> None:
    check_structure(place, whole, data)


@EXHAUSTIVE
@settings(max_examples=MANY_MUTATIONS, deadline=None)
@given(st.data())
def test_other_bytes_are_refused_many_times(place: Path, whole: bytes, data: st.DataObject) -> None:
    check_bytes(place, whole, data)


@EXHAUSTIVE
@settings(max_examples=MANY_MUTATIONS, deadline=None)
@given(st.data())
def test_another_structure_is_refused_or_means_what_it_says_many_times(
    place: Path, whole: bytes, data: st.DataObject
) -> None:
    check_structure(place, whole, data)

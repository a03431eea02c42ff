"""Small files of a run: every flipped bit is found, and a start waits only for files."""

import os
import random
import re
import shutil
from pathlib import Path

import pytest
from support.small_files import make_run, outcome, small_files, unnoticed

FLIPS = 150
NAMES = ["config.json", "records.jsonl", "goodput.jsonl", "best.json", "manifest.json", ".json"]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "run"
    make_run(folder)
    return folder


def copied(original: Path, to: Path) -> Path:
    return Path(shutil.copytree(original, to))


@pytest.mark.promise("outside.flipped-bit")
def test_no_flipped_bit_goes_unnoticed(original: Path, tmp_path: Path) -> None:
    expected = outcome(copied(original, tmp_path / "expected"))
    assert "found" in expected.read
    chance, files = random.Random(0), small_files(original)
    assert all(any(path.name.endswith(name) for path in files) for name in NAMES)
    for path in files:
        bits = 8 * path.stat().st_size
        for bit in chance.sample(range(bits), min(FLIPS // 6, bits)):
            name = path.relative_to(original)
            assert unnoticed(original, name, bit, tmp_path / "flipped", expected) is None


@pytest.mark.promise("outside.hostile-input")
@pytest.mark.parametrize("name", ["config.json", "records.jsonl", "goodput.jsonl", "best.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "link", "deep", "another type"])
def test_what_is_no_file_of_a_run_is_one_line(
    original: Path, tmp_path: Path, name: str, kind: str
) -> None:
    path, other = copied(original, tmp_path / "run") / name, tmp_path / "other"
    other.write_bytes(path.read_bytes())
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(other)
    else:
        path.write_text("[" * 100_000 if kind == "deep" else '{"parallel": [1], "step": "x"}\n')
    found = outcome(tmp_path / "run")
    assert found.fault is None
    assert any(name in line for line in found.said)
    assert other.read_bytes() == (original / name).read_bytes()


@pytest.mark.promise("outside.no-harm-by-a-folder")
@pytest.mark.parametrize("name", ["checkpoints", "lease", "islands", "hlo"])
def test_a_folder_of_a_run_that_is_a_link_is_not_followed(
    original: Path, tmp_path: Path, name: str
) -> None:
    path, other = copied(original, tmp_path / "run") / name, tmp_path / "other"
    if not path.exists():
        path.mkdir()
    path.rename(other)
    (other / ".saving-000000009-1-1").mkdir()
    path.symlink_to(other)
    before = sorted(other.rglob("*"))
    assert [line for line in outcome(tmp_path / "run").said if str(path) in line] != []
    assert sorted(other.rglob("*")) == before


def test_a_link_in_place_of_a_checkpoint_that_is_begun_goes(original: Path, tmp_path: Path) -> None:
    link, other = copied(original, tmp_path / "run") / "checkpoints/.saving-9", tmp_path / "other"
    (other / "mine").mkdir(parents=True)
    link.symlink_to(other)
    assert "found" in outcome(tmp_path / "run").read
    assert not link.is_symlink()
    assert (other / "mine").exists()


@pytest.mark.parametrize(
    ("removed", "killed", "told"),
    [
        ("checkpoints", None, True),
        ("checkpoints", 4, False),
        ("checkpoints/4", None, True),
        ("checkpoints/4", 4, False),
        ("checkpoints/2", None, False),
    ],
)
def test_a_checkpoint_that_is_gone_is_told_unless_it_was_never_whole(
    tmp_path: Path, removed: str, killed: int | None, told: bool
) -> None:
    run = tmp_path / "run"
    make_run(run, (2, 4))
    records = (run / "records.jsonl").read_bytes()
    shutil.rmtree(run / removed)
    if killed is not None:
        (run / f"checkpoints/.saving-{killed:09d}-1-2").mkdir(parents=True)
    missing = re.compile(r"\bstep 4 .* there")
    assert any(map(missing.search, outcome(run).said)) is told
    copy = run / "records-damaged.jsonl"
    assert copy.exists() is (told and removed == "checkpoints")
    assert not copy.exists() or copy.read_bytes() == records
    assert not any(map(missing.search, outcome(run).said))

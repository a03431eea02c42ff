"""Small files of a run: every flipped bit is found, and a start waits only for files."""

import os
import random
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
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "deep", "another type"])
def test_what_is_no_file_of_a_run_is_one_line(
    original: Path, tmp_path: Path, name: str, kind: str
) -> None:
    path = copied(original, tmp_path / "run") / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("[" * 100_000 if kind == "deep" else '{"parallel": [1], "step": "x"}\n')
    found = outcome(tmp_path / "run")
    assert found.fault is None
    assert any(name in line for line in found.said)

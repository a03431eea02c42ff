"""`make test-changed`: from changed lines to the tests that reach them."""

import json
import subprocess
from pathlib import Path

import pytest
from support import changed

SOURCE = """import os

def first():
    return 1

class Big:
    def second(self):
        def inner():
            return 2
        return inner
"""
REACH = {
    "tests": [["tests/test_a.py::test_first", 0.1], ["tests/test_b.py::test_second[x]", 0.2]],
    "functions": {"room.py": {"first": [0], "Big.second": [0, 1]}},
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("src/replicax", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/replicax/room.py").write_text(SOURCE)
    (tmp_path / "tests/reach.json").write_text(json.dumps(REACH))
    (tmp_path / "tests/test_a.py").write_text("def test_first(): ...\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "tests"),
    [
        ("return 1", "return 3", [0]),
        ("return 2", "return 3", [0, 1]),
        ("import os\n", "", [0, 1]),  # outside of functions: all of the file's
        ("return inner", "return inner\n\ndef other():\n    return 5", [0, 1]),
    ],
)
def test_the_tests_of_a_changed_function_run(
    root: Path, old: str, new: str, tests: list[int]
) -> None:
    (root / "src/replicax/room.py").write_text(SOURCE.replace(old, new))
    files, chosen = changed.tests_of(root, changed.changed_lines(root, "HEAD"))
    assert files == []
    assert list(chosen) == [REACH["tests"][number][0] for number in tests]


def test_changed_and_new_files_of_tests_run_whole(root: Path) -> None:
    (root / "tests/test_a.py").write_text("def test_other(): ...\n")
    (root / "tests/test_c.py").write_text("def test_third(): ...\n")
    (root / "src/replicax/room.py").write_text(SOURCE.replace("return 1", "return 3"))
    files, chosen = changed.tests_of(root, changed.changed_lines(root, "HEAD"))
    assert files == ["tests/test_a.py", "tests/test_c.py"]
    assert chosen == {}  # tests/test_a.py runs anyway


def test_nothing_changed_runs_nothing(root: Path) -> None:
    assert changed.tests_of(root, changed.changed_lines(root, "HEAD")) == ([], {})

"""Loading a user's file."""

import json
import sys
from pathlib import Path

import pytest

from replicax.errors import ConfigError
from replicax.text.python_file import load_file


def test_a_file_finds_its_neighbours_and_replaces_no_module(folder: Path) -> None:
    (folder / "my_neighbour.py").write_text("VALUE = 3\n")
    path = folder / "json.py"
    path.write_text("from my_neighbour import VALUE\n")
    assert load_file(path, "a step").VALUE == 3
    assert sys.modules["json"] is json
    load_file(path, "a step")
    assert sys.path.count(str(folder)) == 1


def test_a_file_that_fails_leaves_no_half_of_itself(folder: Path) -> None:
    path = folder / "my_file.py"
    path.write_text("VALUE = 1\n")
    module = load_file(path, "a step")
    for broken in (path, folder / "my_other_file.py"):
        broken.write_text("1 / 0\n")
        with pytest.raises(ZeroDivisionError):
            load_file(broken, "a step")
    assert sys.modules[module.__name__] is module
    assert not [name for name in sys.modules if "my_other_file" in name]


@pytest.mark.parametrize(
    ("name", "words"), [("no_such.py", r"no_such\.py .* a step"), ("notes.txt", "end in .py")]
)
def test_what_is_no_python_file(folder: Path, name: str, words: str) -> None:
    (folder / "notes.txt").touch()
    with pytest.raises(ConfigError, match=words):
        load_file(Path(name), "a step")

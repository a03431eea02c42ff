"""Errors: one family, each with an exit code of the command line and a builtin base."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from replicax import errors
from replicax.errors import MissingDependencyError, ReplicaxError, install_command, require


@pytest.mark.parametrize(
    ("name", "kin", "exit_code"),
    [
        ("ConfigError", ValueError, 2),
        ("DataError", ValueError, 2),
        ("LossError", ValueError, 2),
        ("DivergedError", ArithmeticError, 1),
        ("IslandLeftError", RuntimeError, 75),
        ("StateError", RuntimeError, 1),
        ("MissingDependencyError", ImportError, 2),
    ],
)
def test_every_error_has_an_exit_code_and_a_builtin_kin(
    name: str, kin: type[Exception], exit_code: int
) -> None:
    error = getattr(errors, name)
    assert issubclass(error, ReplicaxError)
    assert issubclass(error, kin)
    assert error.exit_code == exit_code
    assert str(error("two numbers")) == "two numbers"


def test_the_family_tree_in_the_docstring_is_complete() -> None:
    own = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, ReplicaxError)
    }
    assert own == {name for name in own if name in (errors.__doc__ or "")}


class Origin:
    """A distribution with that direct_url.json, or none."""

    def __init__(self, origin: dict[str, Any] | None) -> None:
        self._origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._origin and json.dumps(self._origin)


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'replicax[data]'"),
        (
            {"url": "https://a.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
            "pip install 'replicax[data] @ git+https://a.org/r.git@1f'",
        ),
        (
            {"url": "file:///home/a%20b", "dir_info": {"editable": True}},
            "pip install -e '/home/a b[data]'",
        ),
        ({"url": "file:///home/ab", "dir_info": {}}, "pip install '/home/ab[data]'"),
        (
            {"url": "https://a.org/r-1-py3-none-any.whl", "archive_info": {}},
            "pip install 'replicax[data] @ https://a.org/r-1-py3-none-any.whl'",
        ),
    ],
    ids=["index", "git", "editable", "folder", "archive"],
)
def test_an_extra_is_added_from_where_replicax_was_installed(
    origin: dict[str, Any] | None, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Origin(origin))
    assert install_command("data") == command


def test_an_extra_is_added_from_a_clone_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def distribution(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", distribution)
    clone = Path(errors.__file__).parents[2]
    assert install_command("data") == f"pip install '{clone}[data]'"


def test_a_folder_that_has_the_name_of_a_package_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """wandb leaves a folder named after itself if a run has none."""
    (tmp_path / "only_a_folder").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(MissingDependencyError):
        require("only_a_folder", "data")
    sys.modules.pop("only_a_folder", None)


def test_a_package_that_is_there_and_broken_is_not_called_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("packages")
    (folder / "broken_package.py").write_text("from json import no_such_name\n")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ImportError) as caught:
        require("broken_package", "data")
    assert not isinstance(caught.value, MissingDependencyError)
    sys.modules.pop("broken_package", None)

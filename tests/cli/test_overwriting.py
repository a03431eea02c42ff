"""No command writes over a file that it did not write, whatever the flag."""

import dataclasses
import importlib
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command_line import Main, done, refusal

from replicax.cli import COMMANDS
from replicax.cli.flags import tyro

MINE = b"print('mine')\n"
LINE = "linear_regression --points 48 --epochs 1"
WRITES = {
    ("*", "json_file"): "lint --json-file mine right.py",
    ("lint", "step_file"): "lint --step-file right.py",
    ("train", "dump_hlo"): f"train {LINE} --devices 1 --run new --dump-hlo folder",
    ("train", "run"): f"train {LINE} --devices 1 --run mine",
    ("plan", "run"): f"plan {LINE} --run mine",
    ("bench", "run"): f"bench {LINE} --run mine",
    ("launch", "logs"): "launch --processes 1 --logs folder -- true",
    ("export", "file"): "export none mine --force",
}
"""Command and flag -> a command line that would write over a file of this folder."""
READS = {
    *(("lint", "paths"), ("runs", "folder"), ("doctor", "folders"), ("plan", "noise_scale")),
    *(("train", "init_from"), ("train", "config"), ("evaluate", "data")),
    *(("verify", "step"), ("verify", "reference")),
    *((verb, "run") for verb in ("evaluate", "export", "sample")),
    *((verb, "recipe") for verb in ("evaluate", "export", "sample")),
    ("export", "model"),
}
FILES = (
    *("mine", "right_step.py", "folder/step.hlo", "folder/process-0.log"),
    *("runs/mine/curves.png", "runs/mine/plan.json", "runs/mine/bench.json"),
)


def path_flags() -> Iterator[tuple[str, str]]:
    """Yield command and field of each flag whose value may be a path."""
    for command in COMMANDS:
        module = importlib.import_module(f"replicax.cli.{command}")
        for kind in vars(module).values():
            if dataclasses.is_dataclass(kind) and kind.__module__.startswith("replicax.cli."):
                for field in _of_paths(kind):
                    yield ("*" if field == "json_file" else command), field


def _of_paths(kind: Any) -> Iterator[str]:
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from _of_paths(hint)
        shown = [getattr(each, "metavar", None) or "" for each in getattr(hint, "__metadata__", ())]
        words = {"FILE", "FOLDER", "PATH", "RUN", "RECIPE"}
        named = any(word in text for text in shown for word in words)
        if named or "Path" in str(hint) or name in ("run", "folders"):
            yield name


def test_every_flag_that_takes_a_path_is_known() -> None:
    assert hasattr(tyro.conf.arg(metavar="FILE"), "metavar")
    assert set(path_flags()) == WRITES.keys() | READS


@pytest.fixture
def mine(folder: Path) -> Path:
    for name in FILES:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(MINE)
    (folder / "right.py").write_text("import jax\n")
    return folder


@pytest.mark.promise("outside.no-harm-by-a-folder")
@pytest.mark.parametrize("command", WRITES.values(), ids=map("-".join, WRITES))
def test_a_file_of_the_users_is_not_overwritten(command: str, main: Main, mine: Path) -> None:
    line = refusal(main, *shlex.split(command))
    assert any(Path(name).stem in line for name in (*FILES, "runs/mine"))
    assert {name: (mine / name).read_bytes() for name in FILES} == dict.fromkeys(FILES, MINE)


def test_what_a_command_wrote_it_writes_again(main: Main, mine: Path) -> None:
    lint = ("lint", "right.py", "--json-file", "found.json")
    done(main, *lint)
    whole = Path("found.json").read_text()
    for cut in (whole, whole[:-9], whole[:5], ""):
        Path("found.json").write_text(cut)
        done(main, *lint)
        assert Path("found.json").read_text() == whole


def test_what_cannot_be_read_is_not_overwritten(
    main: Main, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", closed)
    assert "mine" in refusal(main, "lint", "--json-file", "mine", "right.py")

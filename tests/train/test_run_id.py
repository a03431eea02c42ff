"""A run has an id from its first start, which marks its checkpoints."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.resumable import (
    STEPS,
    bits,
    crashing,
    fit,
    model,
    steps_saved,
    whole,
)

import replicax as rx
from replicax.errors import ConfigError
from replicax.train.checkpoints.manifest import read_manifest
from replicax.train.folder.changes import run_id


@pytest.fixture
def two(dp: rx.DataParallel, tmp_path: Path) -> tuple[Path, Path]:
    """Two runs that stopped at steps 7 and 10; the second began with other weights."""
    folders = tmp_path / "a", tmp_path / "b"
    for folder, at, seed in zip(folders, (7, 10), (0, 9), strict=True):
        with crashing(at):
            fit(dp, folder, state=dp.init(model(), seed=seed))
    return folders


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return {name: value for name, value in found.items() if name != "checksum"}


def checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))


def forget(folder: Path) -> None:
    """Turn the run into one from before there were ids."""
    without = config(folder)
    del without["start"]["run"]
    (folder / "config.json").write_text(json.dumps(without))


@pytest.mark.promise("outside.another-run")
def test_checkpoints_of_another_run_are_refused_by_name(
    dp: rx.DataParallel, two: tuple[Path, Path]
) -> None:
    a, b = two
    for each in checkpoints(b):
        shutil.copytree(each, a / "checkpoints" / each.name, dirs_exist_ok=True)
    before, saved = (a / "config.json").read_bytes(), steps_saved(a)
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            fit(dp, a)
    for text in (saved[-1], run_id(config(a)), run_id(config(b))):
        assert str(text) in str(caught.value)
    with pytest.raises(ConfigError, match=saved[-1]):
        rx.load(a, dp=dp, state=dp.abstract_state(model()))
    assert ((a / "config.json").read_bytes(), steps_saved(a)) == (before, saved)


def test_another_runs_checkpoint_that_is_accepted_is_told(
    dp: rx.DataParallel, two: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = two
    own, other = (run_id(config(folder)) for folder in two)
    shutil.copytree(checkpoints(b)[-1], a / "checkpoints" / checkpoints(b)[-1].name)
    fit(dp, a, accept_changes=True, progress=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if f"{other}" in line]
    assert len(lines) == 1
    assert lines[0].startswith("change ")
    assert run_id(config(a)) == run_id(read_manifest(checkpoints(a)[-1]).config) == own


def test_a_run_from_before_ids_goes_on_and_gets_one(
    dp: rx.DataParallel, two: tuple[Path, Path]
) -> None:
    forget(two[0])
    found = fit(dp, two[0])
    assert bits(found.state) == bits(whole(dp).state)
    assert run_id(config(two[0])) is not None


def test_a_checkpoint_of_another_configuration_is_refused_where_ids_are_equal(
    dp: rx.DataParallel, tmp_path: Path
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    with crashing(7):
        fit(dp, a, config={"rate": 1})
    shutil.copytree(a, b)
    fit(dp, b, config={"rate": 2}, accept_changes=True)
    shutil.copytree(checkpoints(b)[-1], a / "checkpoints" / checkpoints(b)[-1].name)
    with pytest.raises(ConfigError, match=r"rate 2 -> 1"):
        fit(dp, a, config={"rate": 1})


def test_a_configuration_that_is_lost_is_restored_from_the_newest_checkpoint(
    dp: rx.DataParallel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with crashing(7):
        fit(dp, folder, config={"rate": 1})
    before = config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"rate 1 -> 2"):
        fit(dp, folder, config={"rate": 2})
    assert not (folder / "config.json").exists()
    found = fit(dp, folder, config={"rate": 1}, progress=True)
    assert found.steps == STEPS - 6
    assert bits(found.state) == bits(whole(dp).state)
    after = config(folder)
    assert run_id(after) == run_id(before)
    del before["start"], after["start"]
    assert after == before
    assert "config.json" in capsys.readouterr().out


def test_a_checkpoint_that_is_a_link_is_refused_and_left_alone(
    dp: rx.DataParallel, two: tuple[Path, Path], tmp_path: Path
) -> None:
    newest = checkpoints(two[0])[-1]
    outside = Path(shutil.move(newest, tmp_path / "outside"))
    newest.symlink_to(outside)
    found = fit(dp, two[0])
    assert found.steps == STEPS - 3  # from the one before
    assert bits(found.state) == bits(whole(dp).state)
    assert (outside / "manifest.json").is_file()

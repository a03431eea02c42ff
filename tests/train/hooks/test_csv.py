"""`CSV`: the file is the table of all records."""

import csv
from pathlib import Path

import pytest
from support.watched_run import WatchedRun

import replicax as rx
from replicax.errors import ConfigError


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_records_are_rows_and_a_new_metric_is_a_new_column(tmp_path: Path) -> None:
    (tmp_path / "records.csv").write_text("kind,step\ntrain,7\ntra")  # of a start that was killed
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "records.csv.new").symlink_to(tmp_path / "mine")
    run = WatchedRun(hook := rx.hooks.CSV(), tmp_path)
    hook.start(run)
    run.trained(1, loss=3.0)
    run.trained(2, loss=2.0)
    run.evaluated(2, loss=2.5, accuracy=0.5)
    run.trained(3, loss=1.0)
    hook.end(run)
    found = rows(tmp_path / "records.csv")
    assert [(row["kind"], row["step"], row["loss"], row["accuracy"]) for row in found] == [
        ("train", "1", "3.0", ""),
        ("train", "2", "2.0", ""),
        ("eval", "2", "2.5", "0.5"),
        ("train", "3", "1.0", ""),
    ]
    assert (tmp_path / "mine").read_text() == "mine"
    assert run.lines == []
    assert hook.summary() == [f"see    {tmp_path / 'records.csv'}"]


def test_rows_of_what_is_no_more_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "own" / "table.csv"
    run = WatchedRun(hook := rx.hooks.CSV(path))
    hook.start(run)
    for step in (1, 2, 3):
        run.trained(step, loss=float(step))
    run.go_back(1, 1)
    run.trained(2, loss=20.0)
    hook.end(run)
    assert [row["loss"] for row in rows(path)] == ["1.0", "20.0"]


def test_what_could_not_be_written_is_there_once_that_can_be(tmp_path: Path) -> None:
    path = tmp_path / "records.csv"
    hook = rx.hooks.CSV(path)
    run = WatchedRun(hook)
    hook.start(run)
    hook.end(run)
    first, second = run.trained(1, loss=1.0), run.trained(2, loss=2.0)
    path.unlink()
    path.mkdir()
    with pytest.raises(OSError, match="directory"):
        hook.write(first)
    path.rmdir()
    hook.write(second)
    assert [row["loss"] for row in rows(path)] == ["1.0", "2.0"]


def test_a_link_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link.csv").symlink_to("mine")
    hook = rx.hooks.CSV(tmp_path / "link.csv")
    with pytest.raises(ConfigError, match=r"link\.csv"):
        hook.start(WatchedRun(hook, tmp_path))
    assert (tmp_path / "mine").read_text() == "mine"

"""A run whose folder is in an object store, or in a stand-in with the same interface."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.object_store import Objects, register
from support.processes import SUPPORT, run_job
from support.resumable import (
    bits,
    crashing,
    data_parallel,
    fit,
    rows,
    settle,
    told,
    untimed,
    whole,
)
from support.tiers import EXHAUSTIVE, only

import replicax as rx
from replicax.errors import CheckpointError, ConfigError, RunInUseError
from replicax.train.files.places import place, write_whole
from replicax.train.files.sealed import sealed

URL = "s3://bucket/runs/x"
EVALUATED = {"eval_source": rows(20, 2)}


@pytest.fixture
def objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    """A store, and a working directory in which nothing is written."""
    for name in ("objects", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield register(tmp_path / "objects")
    settle()  # a run that ended with an error may still save, by then to the next test's store


@pytest.fixture(scope="module")
def dp() -> rx.DataParallel:
    """One for all tests, so that its step is compiled once."""
    return data_parallel(1)


def names(objects: Objects) -> list[str]:
    """Return the contents of the run's folder without leases and checkpoints."""
    found = {key.removeprefix("bucket/runs/x/").split("/")[0] for key in objects.listed()}
    return sorted(found - {"lease", "checkpoints"})


def content(objects: Objects, name: str) -> list[str]:
    return objects._file(f"bucket/runs/x/{name}").read_text().splitlines()


def test_all_files_of_a_run_are_in_the_store(dp: rx.DataParallel, objects: Objects) -> None:
    hooks = [rx.hooks.KeepBest("loss"), rx.hooks.NoiseMeter(5)]
    result = fit(dp, URL, hooks=hooks, log_every=5, **EVALUATED)
    wanted = ["best.json", "config.json", "curves.png", "goodput.jsonl", "noise_scale.json"]
    assert names(objects) == [*wanted, "records.jsonl"]
    assert untimed(content(objects, "records.jsonl")) == told(result.records)
    assert bits(result.state) == bits(whole(dp, log_every=5, **EVALUATED).state)
    found = rx.load(URL, dp=dp, state=result.state)
    assert (found.step, str(found.path.parent)) == (result.step, f"{URL}/checkpoints")
    assert bits(found.state) == bits(result.state)
    assert told(found.records) == told(result.records)[: len(found.records)]
    best = json.loads(content(objects, "best.json")[0])["step"]
    assert rx.load(URL, dp=dp, state=result.state, step="best").step == best
    assert os.listdir() == []


@pytest.mark.promise("checkpoints.object-store")
def test_a_run_that_crashed_goes_on(
    dp: rx.DataParallel, objects: Objects, capsys: pytest.CaptureFixture[str]
) -> None:
    with crashing(8):
        fit(dp, URL, log_every=2, **EVALUATED)
    result = fit(dp, URL, log_every=2, progress=True, **EVALUATED)
    wanted = whole(dp, log_every=2, **EVALUATED)
    assert f"resume {URL}: step 6, saved" in capsys.readouterr().out
    assert bits(result.state) == bits(wanted.state)
    assert untimed(content(objects, "records.jsonl")) == told(wanted.records)
    assert result.goodput is not None
    assert result.goodput.starts == 2
    with pytest.raises(ConfigError, match=r"began\b.*another configuration"):
        fit(data_parallel(1), URL, model=lambda: dict.fromkeys(("hidden", "out"), rows()["x"][:8]))


def killed(folder: Path, at: list[int]) -> list[dict[str, Any]]:
    """Results of runs killed at these operations, after that of an undisturbed one."""
    command = [sys.executable, SUPPORT / "runs_killed.py", folder, *map(str, at)]
    env = {**os.environ, "PYTHONPATH": str(SUPPORT.parent), "TMPDIR": str(folder)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return [json.loads(line) for line in ended.stdout.splitlines()]


AMONG_THEM = [1, 3, 7, 25, 60]
"""Operations (of 90): lease, configuration, a part, beside the second manifest, while deleting."""


SPREAD = [*range(2, 91, 24)]


@pytest.mark.promise("checkpoints.object-store")
@pytest.mark.parametrize(
    "at", only((), [AMONG_THEM, SPREAD, [*range(2, 91, 8)]], sampled=[AMONG_THEM, SPREAD])
)
def test_a_kill_at_any_operation_changes_nothing(tmp_path: Path, at: list[int]) -> None:
    undisturbed, *others = killed(tmp_path, at)
    for number, other in zip(at, others, strict=True):
        assert other == undisturbed, number


@EXHAUSTIVE
def test_a_job_of_two_processes_goes_on(tmp_path: Path) -> None:
    for steps, done in ((6, 6), (10, 4)):
        for ended in run_job(SUPPORT / "job_fit_remote.py", tmp_path, steps):
            assert ended.code == 0, ended.err
            assert ended.out.splitlines()[-1] == f"{done} steps, equal"


def test_who_was_taken_over_leaves_the_records_of_the_other(
    dp: rx.DataParallel, objects: Objects
) -> None:
    class Other(rx.Hook):
        """A start on another host that takes this one for dead."""

        def step(self, run: Any, step: Any) -> None:
            if step.place.step == 8:
                folder = place(URL)
                write_whole(folder / f"lease/00000009-{'0' * 16}.json", sealed({"who": "another"}))
                write_whole(folder / "records.jsonl", b"others")

    with pytest.raises(RunInUseError, match="another"):
        fit(dp, URL, hooks=[Other()], log_every=1)
    assert content(objects, "records.jsonl") == ["others"]


def test_records_that_could_not_be_written_come_later(
    dp: rx.DataParallel,
    objects: Objects,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed, open_file = [], Objects._open

    def open_(self: Objects, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode == "wb" and path.endswith("records.jsonl") and not failed:
            failed.append(path)
            raise RuntimeError("503: slow down")
        return open_file(self, path, mode, **more)

    monkeypatch.setattr(Objects, "_open", open_)
    result = fit(dp, URL, log_every=1, progress=True)
    assert f"ALARM  {URL}/records.jsonl: RuntimeError: 503: slow down" in capsys.readouterr().err
    assert untimed(content(objects, "records.jsonl")) == told(result.records)


@pytest.mark.parametrize(
    "hook",
    [
        rx.hooks.CSV(),
        rx.hooks.TensorBoard(),
        rx.hooks.MLflow(),
        rx.hooks.WandB(),
        rx.hooks.Profile(1, 2),
        rx.hooks.CSV(f"{URL}/a.csv"),
    ],
    ids=lambda hook: hook.name,
)
def test_what_needs_a_file_system_refuses_a_url(
    dp: rx.DataParallel, objects: Objects, hook: rx.Hook
) -> None:
    with pytest.raises(ConfigError, match=r"object store; .*local path") as error:
        fit(dp, URL, hooks=[hook])
    assert "\n" not in str(error.value)
    assert os.listdir() == []


def test_a_hook_with_a_folder_of_its_own_works(dp: rx.DataParallel, objects: Objects) -> None:
    fit(dp, URL, hooks=[rx.hooks.CSV("own.csv")], steps=5)
    assert os.listdir() == ["own.csv"]


def test_what_cannot_be_loaded_is_told_in_one_line(
    dp: rx.DataParallel, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"{URL} .*not a .*no config.json"):
        rx.load(URL, dp=dp)
    with pytest.raises(ConfigError, match=r"^ftp://host/x .*object store"):
        rx.load("ftp://host/x", dp=dp)

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("403: no")

    monkeypatch.setattr(Objects, "ls", refused)
    with pytest.raises(CheckpointError, match=f"{URL} .*read .RuntimeError: 403: no."):
        rx.load(URL, dp=dp)
    with pytest.raises(ConfigError, match=f"{URL}/lease .*written .RuntimeError: 403: no."):
        fit(dp, URL)

"""`KeepBest`: the checkpoint that `best.json` names exists, and is the best."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.watched_run import WatchedRun

import replicax as rx
from replicax.errors import ConfigError
from replicax.train.files.sealed import unsealed


@pytest.fixture
def hook() -> rx.hooks.KeepBest:
    return rx.hooks.KeepBest("accuracy")


@pytest.fixture
def run(hook: rx.hooks.KeepBest, tmp_path: Path) -> WatchedRun:
    run = WatchedRun(hook, tmp_path)
    hook.start(run)
    return run


def saved(run: WatchedRun, step: int) -> None:
    """A checkpoint is in its place."""
    (run.folder / "checkpoints" / str(step)).mkdir(parents=True)


def best(run: WatchedRun, file: str = "best.json") -> Any:
    path = run.folder / file
    return unsealed(path.read_bytes(), dict[str, Any]) if path.exists() else None


def test_the_one_before_stays_until_the_new_one_is_there(
    hook: rx.hooks.KeepBest, run: WatchedRun
) -> None:
    run.evaluated(10, accuracy=0.5)
    saved(run, 10)
    hook.settle(run, due=False)
    run.evaluated(20, accuracy=0.75)
    hook.settle(run, due=False)
    assert (best(run)["step"], set(hook.pinned)) == (10, {10, 20})
    saved(run, 20)
    hook.settle(run, due=False)
    assert (best(run)["step"], set(hook.pinned)) == (20, {20})


def test_a_save_that_failed_is_said_and_the_file_names_the_one_before(
    hook: rx.hooks.KeepBest, run: WatchedRun
) -> None:
    run.evaluated(10, accuracy=0.5)
    saved(run, 10)
    hook.settle(run, due=False)
    run.evaluated(20, accuracy=0.75)
    hook.end(run)
    assert best(run)["step"] == 10
    assert len(run.lines) == 1
    assert "20" in run.lines[0]


def test_a_kill_before_it_was_named_leaves_that_to_the_next_start(
    hook: rx.hooks.KeepBest, run: WatchedRun
) -> None:
    run.evaluated(10, accuracy=0.5)
    saved(run, 10)
    state = json.loads(json.dumps(hook.save_state()))
    again = rx.hooks.KeepBest("accuracy")
    again.load_state(state)
    resumed = WatchedRun(again, run.folder)
    again.start(resumed)
    assert best(run)["step"] == 10
    resumed.evaluated(20, accuracy=0.25)
    assert resumed.saves == 0


def test_a_value_of_other_evaluation_data_is_compared_no_longer(tmp_path: Path) -> None:
    sets = {"data": {"evaluation": {"test": "80 rows, 0a", "dev": "80 rows, 0b"}}}
    hook = rx.hooks.KeepBest("dev/loss")
    run = WatchedRun(hook, tmp_path)
    run.config = sets
    hook.start(run)
    run.evaluated(10, **{"dev/loss": 0.5})
    state = json.loads(json.dumps(hook.save_state()))
    for changed, best_step in (("test", 10), ("dev", 20)):
        again = rx.hooks.KeepBest("dev/loss")
        again.load_state(state)
        resumed = WatchedRun(again, tmp_path)
        resumed.config = {"data": {"evaluation": sets["data"]["evaluation"] | {changed: "new"}}}
        again.start(resumed)
        resumed.evaluated(20, **{"dev/loss": 0.75})
        assert (set(again.pinned), len(resumed.lines)) == ({best_step}, best_step // 20)


def test_where_the_run_went_back_a_lost_best_is_none(
    hook: rx.hooks.KeepBest, run: WatchedRun
) -> None:
    run.evaluated(10, accuracy=0.5)
    state = hook.save_state()
    run.evaluated(20, accuracy=0.75)
    run.go_back(10, 1, state)
    assert set(hook.pinned) == {10}
    run.evaluated(20, accuracy=0.625)
    assert (run.saves, set(hook.pinned)) == (3, {20})


def test_several_have_files_of_their_own(tmp_path: Path) -> None:
    for hook in (rx.hooks.KeepBest("accuracy"), rx.hooks.KeepBest("loss", file="best-loss.json")):
        run = WatchedRun(hook, tmp_path)
        hook.start(run)
        run.evaluated(10, accuracy=0.5, loss=2.0)
        run.evaluated(20, accuracy=0.5, loss=1.0)
        for step in (10, 20):
            (tmp_path / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
        hook.end(run)
    assert (best(run)["step"], best(run, "best-loss.json")["step"]) == (10, 20)


def test_two_that_write_one_file_are_found_out(tmp_path: Path) -> None:
    hooks = rx.hooks.KeepBest("accuracy"), rx.hooks.KeepBest("loss")
    assert hooks[0].name != hooks[1].name
    runs = [WatchedRun(hook, tmp_path) for hook in hooks]
    for hook, run in zip(hooks, runs, strict=True):
        hook.start(run)
        run.evaluated(10, accuracy=0.5, loss=2.0)
    saved(runs[0], 10)
    hooks[0].settle(runs[0], due=False)
    with pytest.raises(ConfigError, match=r"best-loss\.json"):
        hooks[1].settle(runs[1], due=False)


def test_another_process_decides_alike_and_writes_nothing(hook: rx.hooks.KeepBest) -> None:
    run = WatchedRun(hook, is_main=False)
    hook.start(run)
    run.evaluated(10, accuracy=0.5)
    hook.settle(run, due=True)
    hook.end(run)
    assert (run.saves, run.lines) == (1, [])

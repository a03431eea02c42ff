"""`Trackio`: its database on this machine, read by trackio itself."""

import json
import secrets
from pathlib import Path
from typing import Any

import pytest
from support.tiers import EXHAUSTIVE
from support.watched_run import WatchedRun

import replicax as rx


@EXHAUSTIVE
def test_a_run_that_goes_on_is_the_same_run_there(tmp_path: Path) -> None:
    trackio = pytest.importorskip("trackio", reason="no trackio, which is in the lock")
    from trackio.sqlite_storage import SQLiteStorage

    project, state = f"digits-{secrets.token_hex(4)}", None
    for step in (10, 20):
        hook = rx.Trackio(project, auto_log_cpu=False, auto_log_gpu=False)
        if state is not None:
            hook.load_state(state)
        run = WatchedRun(hook, tmp_path)
        hook.start(run)
        state = json.loads(json.dumps(hook.save_state()))
        run.trained(step, loss=float(step))
        hook.end(run)
        assert run.lines == []
    (found,) = trackio.Api().runs(project)
    assert (found.name, found.config["recipe"]) == (state, {"width": 3})
    rows = SQLiteStorage.get_logs(project, state)
    assert [(row["step"], row["train/loss"]) for row in rows] == [(10, 10.0), (20, 20.0)]


def test_each_run_has_a_name_of_its_own_after_its_folder(tmp_path: Path) -> None:
    def name(folder: Path | None, **given: Any) -> Any:
        hook = rx.Trackio("digits", **given)
        hook.start(WatchedRun(hook, folder, is_main=False))
        return hook.save_state()

    first, second = name(tmp_path), name(tmp_path)
    assert first != second
    assert {each.rpartition("-")[0] for each in (first, second)} == {tmp_path.name}
    assert name(None, name="mine") == "mine"

"""`Comet`: the archives of an offline experiment."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.tiers import EXHAUSTIVE
from support.watched_run import WatchedRun

import replicax as rx


def logged(archive: Path) -> tuple[dict[str, Any], dict[str, Any], list[tuple[int, float]]]:
    """Return an archive's experiment, its parameters, and the loss by step."""
    parameters, losses = {}, []
    with zipfile.ZipFile(archive) as opened:
        experiment = json.loads(opened.read("experiment.json"))
        for line in opened.read("messages.json").decode().splitlines():
            payload = json.loads(line)["payload"]
            if "param" in payload:
                parameters[payload["param"]["paramName"]] = payload["param"]["paramValue"]
            elif payload.get("metric", {}).get("metricName") == "train/loss":
                losses.append((payload["metric"]["step"], payload["metric"]["metricValue"]))
    return experiment, parameters, losses


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine is looked up or patched."""
    for name in ("CODE", "GIT_METADATA", "GIT_PATCH", "ENV_DETAILS"):
        monkeypatch.setenv(f"COMET_AUTO_LOG_{name}", "false")


@EXHAUSTIVE
@pytest.mark.usefixtures("_quiet")
def test_a_run_that_goes_on_is_the_same_experiment_there(tmp_path: Path) -> None:
    pytest.importorskip("comet_ml", reason="no comet_ml, which is in the lock")
    state, archives = None, set[Path]()
    for step in (10, 20):
        hook = rx.Comet("digits", online=False)
        if state is not None:
            hook.load_state(state)
        run = WatchedRun(hook, tmp_path)
        hook.start(run)
        state = json.loads(json.dumps(hook.save_state()))
        run.trained(step, loss=float(step))
        hook.end(run)
        assert run.lines == []
        (archive,) = set(tmp_path.glob("comet/*.zip")) - archives
        archives.add(archive)
        experiment, parameters, losses = logged(archive)
        assert (experiment["offline_id"], experiment["project_name"]) == (state, "digits")
        assert experiment["resume_strategy"] == "get_or_create"
        assert parameters["recipe|width"] == 3
        assert losses == [(step, float(step))]


def test_each_run_has_a_key_of_its_own() -> None:
    def key(**given: Any) -> Any:
        hook = rx.Comet("digits", **given)
        hook.start(WatchedRun(hook, is_main=False))
        return hook.save_state()

    keys = {key(), key()}
    assert {len(each) for each in keys} == {32}
    assert len(keys) == 2
    assert key(experiment_key="a" * 32) == "a" * 32

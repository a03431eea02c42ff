"""`MLflow`: its files, read by its own client."""

from pathlib import Path
from typing import Any

import pytest
from support.tiers import EXHAUSTIVE
from support.watched_run import WatchedRun

import replicax as rx
from replicax.errors import ConfigError

WHY = "no MLflow, which is in the lock"


@pytest.fixture(scope="module")
def mlflow() -> Any:
    return pytest.importorskip("mlflow", reason=WHY)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook sets it, for its own store and for who reads it here."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")


def client(mlflow: Any, folder: Path) -> Any:
    return mlflow.MlflowClient(tracking_uri=(folder / "mlflow").as_uri())


def the_run(mlflow: Any, folder: Path) -> Any:
    store = client(mlflow, folder)
    (run,) = store.search_runs([store.get_experiment_by_name("digits").experiment_id])
    return run


def history(mlflow: Any, folder: Path, name: str) -> list[tuple[int, float]]:
    run_id = the_run(mlflow, folder).info.run_id
    found = client(mlflow, folder).get_metric_history(run_id, name)
    return sorted((metric.step, metric.value) for metric in found)


@EXHAUSTIVE
def test_metrics_are_there_by_step_and_the_configuration_as_parameters(
    mlflow: Any, tmp_path: Path
) -> None:
    run = WatchedRun(hook := rx.MLflow(experiment="digits"), tmp_path)
    hook.start(run)
    run.trained(10, loss=2.0)
    run.trained(20, loss=1.0)
    run.evaluated(20, **{"top-5 (%)": 50.0})
    hook.end(run)
    assert run.lines == []
    assert history(mlflow, tmp_path, "train/loss") == [(10, 2.0), (20, 1.0)]
    assert history(mlflow, tmp_path, "eval/top-5 ___") == [(20, 50.0)]
    found = the_run(mlflow, tmp_path)
    assert found.data.params == {"recipe.width": "3", "seed": "0"}
    assert found.info.status == "FINISHED"


@EXHAUSTIVE
def test_the_next_start_is_the_same_run(mlflow: Any, tmp_path: Path) -> None:
    state = None
    for step in (10, 20):
        hook = rx.MLflow(experiment="digits")
        if state is not None:
            hook.load_state(state)
        run = WatchedRun(hook, tmp_path)
        hook.start(run)
        run.trained(step, loss=1.0)
        while state is None:
            state = hook.save_state()
        run.error = RuntimeError() if step == 20 else None
        hook.end(run)
    assert [step for step, _ in history(mlflow, tmp_path, "train/loss")] == [10, 20]
    assert the_run(mlflow, tmp_path).info.status == "FAILED"


def test_a_run_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match="run_dir"):
        rx.MLflow().start(WatchedRun(rx.MLflow()))

"""Loggers of other packages: what they hold of a run, read by their clients or from their files."""

import json
import re
import secrets
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.tiers import EXHAUSTIVE
from support.waiting import until
from support.watched_run import WatchedRun

import replicax as rx
from replicax.errors import ConfigError, MissingDependencyError

CONFIG = {"recipe": {"width": 3}, "seed": 0}
BLOCK, HEADER = 32768, 7


class Held(NamedTuple):
    """Ids, configuration and points of all starts in a folder."""

    ids: set[str | None]
    config: dict[str, Any]  # of the last start
    points: list[tuple[str, int, float]]  # name, step, value

    def points_of(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for each, step, value in self.points if each == name]


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent or looked up on this machine, and what hooks set is undone."""
    for name in ("CODE", "GIT_METADATA", "GIT_PATCH", "ENV_DETAILS"):
        monkeypatch.setenv(f"COMET_AUTO_LOG_{name}", "false")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")


def in_tensorboard(folder: Path, project: str = "") -> Held:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    text = found.Tensors("config")[-1].tensor_proto.string_val[0].decode()
    names = found.Tags()["scalars"]
    points = [(name, each.step, each.value) for name in names for each in found.Scalars(name)]
    return Held({None}, json.loads(text.removeprefix("```json").removesuffix("```")), points)


def in_wandb(folder: Path, project: str) -> Held:
    ids, config, points = set(), {}, []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id if record.run.project == project else None)
                updates = record.run.config.update
                config = {each.key: json.loads(each.value_json) for each in updates}
                config = {name: value for name, value in config.items() if name in CONFIG}
            if record.HasField("history"):
                items = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                points += [(name, items["step"], value) for name, value in items.items()]
    # W&B names a start by its second: two of one run within it would be one folder.
    next_second = int(time.time()) + 1
    until(lambda: time.time() >= next_second)
    return Held(ids, config, points)


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of an offline run's file, a log in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a whole block, or its last part
            yield Record.FromString(whole)
            whole = b""


def in_trackio(folder: Path, project: str) -> Held:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs(project)
    rows = SQLiteStorage.get_logs(project, run.name)
    points = [(name, row["step"], value) for row in rows for name, value in row.items()]
    return Held({run.name}, {name: run.config[name] for name in CONFIG}, points)


def in_mlflow(folder: Path, project: str) -> Held:
    run, client = mlflow_run(folder, project)
    points = [
        (name, each.step, each.value)
        for name in run.data.metrics
        for each in client.get_metric_history(run.info.run_id, name)
    ]
    return Held({run.info.run_id}, run.data.params, points)


def mlflow_run(folder: Path, project: str) -> tuple[Any, Any]:
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    return run, client


def in_comet(folder: Path, project: str) -> Held:
    ids, config, points = set(), {}, []
    for archive in sorted(folder.glob("comet/*.zip"), key=lambda path: path.stat().st_mtime_ns):
        with zipfile.ZipFile(archive) as opened:
            experiment = json.loads(opened.read("experiment.json"))
            lines = opened.read("messages.json").decode().splitlines()
        assert experiment["resume_strategy"] == "get_or_create"
        ids.add(experiment["offline_id"] if experiment["project_name"] == project else None)
        payloads = [json.loads(line)["payload"] for line in lines]
        given = [each["param"] for each in payloads if "param" in each]
        config = {each["paramName"]: each["paramValue"] for each in given}
        config = {name: value for name, value in config.items() if name.split("|")[0] in CONFIG}
        metrics = [each["metric"] for each in payloads if "metric" in each]
        points += [(each["metricName"], each["step"], each["metricValue"]) for each in metrics]
    return Held(ids, config, points)


class Destination(NamedTuple):
    """A logger, and how to read what it wrote."""

    package: str
    hook: Callable[[str], rx.hooks.Logger]
    held: Callable[[Path, str], Held]
    config: dict[str, Any] = CONFIG
    evaluated: str = "eval/top-5 (%)"
    knows_runs: bool = True  # if not, it hides the steps that are done again


DESTINATIONS = {  # by the name of the extra
    "tensorboard": Destination(
        "tensorboard", lambda _: rx.hooks.TensorBoard(), in_tensorboard, knows_runs=False
    ),
    "wandb": Destination("wandb", rx.hooks.WandB, in_wandb),
    "trackio": Destination(
        "trackio", partial(rx.hooks.Trackio, auto_log_cpu=False, auto_log_gpu=False), in_trackio
    ),
    "mlflow": Destination(
        "mlflow",
        lambda project: rx.hooks.MLflow(experiment=project),
        in_mlflow,
        {"recipe.width": "3", "seed": "0"},
        "eval/top-5 ___",
    ),
    "comet": Destination(
        "comet_ml", partial(rx.hooks.Comet, online=False), in_comet, {"recipe|width": 3, "seed": 0}
    ),
}


@EXHAUSTIVE
@pytest.mark.parametrize("extra", DESTINATIONS)
def test_a_run_that_goes_on_is_the_same_run_there(extra: str, tmp_path: Path) -> None:
    to = DESTINATIONS[extra]
    pytest.importorskip(to.package, reason=f"no {to.package}, which is in the lock")
    project, state = f"digits-{secrets.token_hex(4)}", None
    expected: list[tuple[int, float]] = []
    for begins, losses in ((0, [(10, 10.0), (20, 20.0)]), (10, [(20, 0.5)])):
        hook = to.hook(project)
        if state is not None:
            hook.load_state(state)
        run = WatchedRun(hook, tmp_path)
        run.go_back(begins, 0)
        hook.start(run)
        for step, loss in losses:
            run.trained(step, loss=loss)
        run.evaluated(20, **{"top-5 (%)": 50.0})
        until(lambda hook=hook: hook.save_state() is not None or not to.knows_runs)
        state = json.loads(json.dumps(hook.save_state()))
        hook.end(run)
        assert run.lines == []
        held = to.held(tmp_path, project)
        assert (held.ids, held.config) == ({state}, to.config)
        kept = [each for each in expected if to.knows_runs or each[0] <= begins]
        expected = sorted([*kept, *losses])
        assert sorted(held.points_of("train/loss")) == expected
        assert held.points_of("train/rows_per_second") == [(step, 20.0) for step, _ in expected]
        assert set(held.points_of(to.evaluated)) == {(20, 50.0)}


@EXHAUSTIVE
def test_tensorboard_hides_what_was_after_the_step_a_run_went_back_to(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="no tensorboard, which is in the lock")
    run = WatchedRun(hook := rx.hooks.TensorBoard(tmp_path / "tensorboard"))
    hook.start(run)
    for step in (10, 20, 30):
        run.trained(step, loss=float(step))
    run.go_back(10, 1)
    run.trained(20, loss=0.5)
    hook.end(run)
    assert in_tensorboard(tmp_path).points_of("train/loss") == [(10, 10.0), (20, 0.5)]


@EXHAUSTIVE
@pytest.mark.parametrize(("error", "status"), [(None, "FINISHED"), (RuntimeError(), "FAILED")])
def test_mlflow_shows_how_a_run_ended(
    error: BaseException | None, status: str, tmp_path: Path
) -> None:
    pytest.importorskip("mlflow", reason="no mlflow, which is in the lock")
    run = WatchedRun(hook := rx.hooks.MLflow(experiment="digits"), tmp_path)
    hook.start(run)
    run.trained(10, loss=1.0)
    run.error = error
    hook.end(run)
    assert mlflow_run(tmp_path, "digits")[0].info.status == status


@pytest.mark.parametrize(
    ("logger", "argument", "pattern"),
    [
        (rx.hooks.WandB, "id", "[0-9a-f]{8}"),
        (rx.hooks.Trackio, "name", "folder-[0-9a-f]{4}"),
        (rx.hooks.Comet, "experiment_key", "[0-9a-f]{32}"),
    ],
)
def test_each_run_has_an_id_of_its_own_or_the_given_one(
    logger: Any, argument: str, pattern: str, tmp_path: Path
) -> None:
    def id_of(hook: rx.hooks.Logger, folder: Path | None) -> Any:
        run = WatchedRun(hook, folder, is_main=False)
        hook.start(run)
        found = hook.save_state()
        hook.end(run)
        return found

    hook = logger("digits")
    ids = {id_of(hook, tmp_path / "folder") for _ in range(2)}
    assert len(ids) == 2
    assert all(re.fullmatch(pattern, each) for each in ids)
    assert id_of(logger("digits", **{argument: "a" * 32}), None) == "a" * 32


@pytest.mark.parametrize("extra", DESTINATIONS)
def test_a_package_that_is_missing_is_named_as_the_run_begins(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = DESTINATIONS[extra]
    monkeypatch.setitem(sys.modules, to.package, None)
    hook = to.hook("p")
    with pytest.raises(MissingDependencyError, match=rf"^{to.package} .*\[{extra}\]"):
        hook.before_run(WatchedRun(hook, tmp_path))


@pytest.mark.parametrize("logger", [rx.hooks.CSV, rx.hooks.MLflow, rx.hooks.TensorBoard])
def test_a_run_without_a_folder_is_refused(logger: type[rx.hooks.Logger]) -> None:
    with pytest.raises(ConfigError, match="run_dir"):
        logger().start(WatchedRun(logger()))

"""Loggers for TensorBoard, Weights & Biases and MLflow."""

import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replicax.arguments import typed
from replicax.errors import require
from replicax.train.hook import Running
from replicax.train.hooks.logger import Logger, Start, scalars
from replicax.train.places import on_disk
from replicax.train.records import Record

STEP = "step"
INIT_SECONDS = 20
"""Timeout of `wandb.init`; the next record tries again."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_MOST_PARAMS = 100  # per request
_LONGEST = 6000  # characters per parameter


class TensorBoard(Logger):
    """Writes event files for TensorBoard: metrics and figures by step, and the configuration.

    When a run resumes, TensorBoard hides the steps that a killed process did after the checkpoint.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x",
        ...        hooks=[rx.TensorBoard()])  # then: tensorboard --logdir runs

    Args:
        folder: `tensorboard` in the run's folder by default.

    Raises:
        MissingDependencyError: in a run, tensorboardX is not installed.
        ConfigError: in a run, no folder.
    """

    package = "tensorboardX"

    @typed
    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder, self._path = folder, Path()
        self._writer: Any = None

    def start(self, run: Running) -> None:
        if run.is_main:
            self._path = on_disk(run.folder, self._folder, "tensorboard", "TensorBoard()")
        super().start(run)

    def open(self, start: Start) -> None:
        from tensorboardX.summary import text

        self._path.mkdir(parents=True, exist_ok=True)
        self.go_back(start)
        config = json.dumps(start.config, indent=2, default=str)
        self._add(start.step, summary=text("config", f"```json\n{config}\n```"))

    def write(self, record: Record) -> None:
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=v) for name, v in scalars(record).items()]
        self._add(record.step, summary=Summary(value=values))

    def go_back(self, start: Start) -> None:
        from tensorboardX.proto.event_pb2 import SessionLog

        self._add(start.step + 1, session_log=SessionLog(status=SessionLog.START))

    def close(self, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, **what: Any) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event

        # After a failed write, continue in a new file. File names begin with the time in seconds,
        # so the suffix separates two starts within one second.
        writer, self._writer = self._writer, None
        if writer is None:
            writer = EventsWriter(str(self._path / "events"), f".{time.time_ns()}")
        writer.write_event(Event(wall_time=time.time(), step=step, **what))
        writer.flush()
        self._writer = writer


class _Resuming(Logger):
    """A logger that saves the tracker's run ID in checkpoints, to continue the same tracked run.

    Steps that a killed process did after its last checkpoint then appear twice, with equal values.
    """

    _id: str | None = None

    def end(self, run: Running) -> None:
        super().end(run)
        self._id = None  # the hook may be used for another run

    def save_state(self) -> Any:
        return self._id

    def load_state(self, state: Any) -> None:
        self._id = state


class WandB(_Resuming):
    """Sends metrics and figures by step, and the configuration, to Weights & Biases.

    A resumed run continues the same W&B run, whose ID is saved in checkpoints. Steps that a killed
    process did after its last checkpoint then appear twice, with equal values.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x",
        ...        hooks=[rx.WandB("digits", tags=["first"])])

    Args:
        project: name of the project.
        init: further arguments of `wandb.init`, such as `mode="offline"`.

    Raises:
        MissingDependencyError: in a run, wandb is not installed.
        ConfigError: the run's folder is in an object store and no `dir` is given.
    """

    package = "wandb"

    def __init__(self, project: str | None = None, **init: Any) -> None:
        self._init = {"project": project, **init}
        self._run: Any = None

    def start(self, run: Running) -> None:
        self._id = self._init.get("id") or self._id or secrets.token_hex(4)
        if run.folder is not None:
            on_disk(run.folder, self._init.get("dir"), "wandb", "WandB()")
        super().start(run)

    def open(self, start: Start) -> None:
        wandb = require("wandb", "loggers")
        given = {"dir": start.folder, "config": start.config, "resume": "allow"}
        # The default is 90 s, which would delay the end of the process if there is no response.
        settings = wandb.Settings(init_timeout=INIT_SECONDS)
        self._run = wandb.init(**{**given, "settings": settings, **self._init, "id": self._id})
        # W&B's built-in steps cannot decrease, but a run that resumes from a checkpoint goes back.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def write(self, record: Record) -> None:
        self._run.log({STEP: record.step, **scalars(record)})

    def close(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


class MLflow(_Resuming):
    """Sends metrics and figures by step, and the configuration as parameters, to MLflow.

    A resumed run continues the same MLflow run, whose ID is saved in checkpoints. Steps that a
    killed process did after its last checkpoint then appear twice, with equal values.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x",
        ...        hooks=[rx.MLflow("http://host:5000", experiment="digits")])

    Args:
        uri: URI of the tracking server or store; by default files in `mlflow` in the run's folder.
        experiment: name of the experiment, created if it does not exist.

    Raises:
        MissingDependencyError: in a run, mlflow is not installed.
        ConfigError: in a run, neither a `uri` nor a folder.
    """

    package = "mlflow"

    @typed
    def __init__(self, uri: str | None = None, *, experiment: str = "replicax") -> None:
        self._uri, self._experiment = uri, experiment
        self._where: str | None = None
        self._client: Any = None

    def start(self, run: Running) -> None:
        self._where = self._uri
        if run.is_main and self._uri is None:
            self._where = on_disk(run.folder, None, "mlflow", "MLflow()").absolute().as_uri()
        super().start(run)

    def open(self, start: Start) -> None:
        mlflow = require("mlflow", "loggers")
        if self._uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # or it requires a database
        client = mlflow.MlflowClient(tracking_uri=self._where)
        if self._id is None:
            found = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if found is None else found
            experiment = getattr(experiment, "experiment_id", experiment)
            name = None if start.folder is None else start.folder.name
            self._id = client.create_run(experiment, run_name=name).info.run_id
            params = [mlflow.entities.Param(*pair) for pair in _params(start.config)]
            for first in range(0, len(params), _MOST_PARAMS):
                client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])
        else:
            client.update_run(self._id, status="RUNNING")
        self._client = client

    def write(self, record: Record) -> None:
        entities = require("mlflow.entities", "loggers")
        now = int(time.time() * 1000)
        metrics = [
            entities.Metric(_name(name), value, now, record.step)
            for name, value in scalars(record).items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, error: BaseException | None) -> None:
        self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")


def _name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)


def _params(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the leaves of a configuration with names such as `recipe.width`."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _params(value, f"{prefix}{name}.")
        else:
            yield _name(f"{prefix}{name}"), str(value)[:_LONGEST]

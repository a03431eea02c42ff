"""Loggers for Weights & Biases, trackio, MLflow and Comet."""

import os
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from replicax.errors import require
from replicax.text.arguments import typed
from replicax.train.files.places import on_disk, shown
from replicax.train.files.records import Record
from replicax.train.hooks.hook import Running
from replicax.train.hooks.logger import Logger, Start, scalars

STEP = "step"
INIT_SECONDS = 20
"""Timeout of `wandb.init`; the next record tries again."""
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_MOST_PARAMS = 100  # per request
_LONGEST = 6000  # characters per parameter


class _Resuming(Logger):
    """A logger that saves the tracker's run ID in checkpoints, to continue the same tracked run."""

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
        ...        hooks=[rx.hooks.WandB("digits", tags=["first"])])

    Args:
        project: name of the project.
        init: further arguments of `wandb.init`, such as `mode="offline"`.

    Raises:
        MissingDependencyError: in a run, wandb is not installed.
        ConfigError: the run's folder is in an object store and no `dir` is given.
    """

    package = extra = "wandb"

    def __init__(self, project: str | None = None, **init: Any) -> None:
        self._init = {"project": project, **init}
        self._run: Any = None

    def start(self, run: Running) -> None:
        self._id = self._init.get("id") or self._id or secrets.token_hex(4)
        if run.folder is not None:
            on_disk(run.folder, self._init.get("dir"), "wandb", "WandB()")
        super().start(run)

    def open(self, start: Start) -> None:
        wandb = require("wandb", self.extra)
        given = {"dir": start.folder, "config": start.config, "resume": "allow"}
        # The default is 90 s, which would delay the end of the process if there is no response.
        settings = wandb.Settings(init_timeout=INIT_SECONDS)
        self._run = wandb.init(**{**given, "settings": settings, **self._init, "id": self._id})
        # W&B's built-in steps cannot decrease, but a run that resumes from a checkpoint goes back.
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        self.looked_at = self._run.url or f"wandb sync {shown(Path(self._run.dir).parent)}"

    def write(self, record: Record) -> None:
        self._run.log({STEP: record.step, **scalars(record)})

    def close(self, error: BaseException | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


class Trackio(_Resuming):
    """Writes metrics and figures by step, and the configuration, to trackio, on this machine.

    A resumed run continues the same trackio run, whose name is saved in checkpoints. Steps that a
    killed process did after its last checkpoint then appear twice, with equal values.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x",
        ...        hooks=[rx.hooks.Trackio("digits")])  # then: trackio show

    Args:
        project: name of the project.
        init: further arguments of `trackio.init`, such as `space_id="me/space"`.

    Raises:
        MissingDependencyError: in a run, trackio is not installed.
    """

    package = extra = "trackio"

    def __init__(self, project: str = "replicax", **init: Any) -> None:
        self._init = {"project": project, **init}
        self._run: Any = None

    def start(self, run: Running) -> None:
        name = "run" if run.folder is None else run.folder.name
        self._id = self._init.get("name") or self._id or f"{name}-{secrets.token_hex(2)}"
        super().start(run)

    def open(self, start: Start) -> None:
        given = {"config": start.config, "resume": "allow", "embed": False}
        trackio = require("trackio", self.extra)
        self._run = trackio.init(**{**given, **self._init, "name": self._id})
        self.looked_at = f"trackio show --project {self._init['project']}"

    def write(self, record: Record) -> None:
        self._run.log(scalars(record), step=record.step)

    def close(self, error: BaseException | None) -> None:
        self._run.finish()


class Comet(_Resuming):
    """Sends metrics and figures by step, and the configuration as parameters, to Comet.

    A resumed run continues the same experiment, whose key is saved in checkpoints. Steps that a
    killed process did after its last checkpoint then appear twice, with equal values.

    Examples:
        >>> # afterwards: comet upload runs/x/comet/*
        >>> offline = rx.hooks.Comet("digits", online=False)
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x", hooks=[offline])

    Args:
        project: name of the project.
        start: further arguments of `comet_ml.start`, such as `online=False`, which writes archives
            to `comet` in the run's folder.

    Raises:
        MissingDependencyError: in a run, comet_ml is not installed.
        ConfigError: the run's folder is in an object store and no `experiment_config` is given.
    """

    package, extra = "comet_ml", "comet"

    def __init__(self, project: str | None = None, **start: Any) -> None:
        self._start = {"project_name": project, **start}
        self._config: dict[str, Any] = {}
        self._experiment: Any = None

    def start(self, run: Running) -> None:
        self._id = self._start.get("experiment_key") or self._id or secrets.token_hex(16)
        if run.folder is not None and "experiment_config" not in self._start:
            folder = on_disk(run.folder, None, "comet", "Comet()")
            self._config = {"name": run.folder.name, "offline_directory": str(folder)}
        super().start(run)

    def open(self, start: Start) -> None:
        comet = require("comet_ml", self.extra)
        given = {"experiment_config": comet.ExperimentConfig(**self._config)}
        self._experiment = comet.start(**{**given, **self._start, "experiment_key": self._id})
        self._experiment.log_parameters(start.config)
        if self._config and not self._start.get("online", True):
            self.looked_at = f"comet upload {shown(Path(self._config['offline_directory']))}/*"

    def write(self, record: Record) -> None:
        self._experiment.log_metrics(scalars(record), step=record.step)

    def close(self, error: BaseException | None) -> None:
        self._experiment.end()


class MLflow(_Resuming):
    """Sends metrics and figures by step, and the configuration as parameters, to MLflow.

    A resumed run continues the same MLflow run, whose ID is saved in checkpoints. Steps that a
    killed process did after its last checkpoint then appear twice, with equal values.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x",
        ...        hooks=[rx.hooks.MLflow("http://host:5000", experiment="digits")])

    Args:
        uri: URI of the tracking server or store; by default files in `mlflow` in the run's folder.
        experiment: name of the experiment, created if it does not exist.

    Raises:
        MissingDependencyError: in a run, mlflow is not installed.
        ConfigError: in a run, neither a `uri` nor a folder.
    """

    package = extra = "mlflow"

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
        mlflow = require("mlflow", self.extra)
        if self._uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # or it requires a database
        client = mlflow.MlflowClient(tracking_uri=self._where)
        if self._id is None:
            known = client.get_experiment_by_name(self._experiment)
            experiment = client.create_experiment(self._experiment) if known is None else known
            experiment = getattr(experiment, "experiment_id", experiment)
            name = None if start.folder is None else start.folder.name
            self._id = client.create_run(experiment, run_name=name).info.run_id
            params = [mlflow.entities.Param(*pair) for pair in _params(start.config)]
            for first in range(0, len(params), _MOST_PARAMS):
                client.log_batch(self._id, params=params[first : first + _MOST_PARAMS])
        else:
            client.update_run(self._id, status="RUNNING")
        self._client = client
        self.looked_at = self._uri
        if self._uri is None:
            self.looked_at = (
                f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri {self._where}"
            )

    def write(self, record: Record) -> None:
        entities = require("mlflow.entities", self.extra)
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

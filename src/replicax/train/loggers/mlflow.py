"""`MLflow`: the records of a run in an MLflow tracking store."""

import os
import re
import time
from collections.abc import Iterator
from typing import Any

from replicax.errors import require
from replicax.train.hook import Running
from replicax.train.hooks.folder import on_disk
from replicax.train.loggers.logger import Logger, Start, scalars
from replicax.train.records import Record

FOLDER = "mlflow"

_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_MOST_PARAMS = 100
"""In one request."""
_LONGEST = 6000
"""Characters of a parameter."""


class MLflow(Logger):
    """Sends metrics and figures by step, and the configuration as parameters, to MLflow.

    A run that is started again goes on as the same run there, whose id is in the checkpoints. What
    a killed start did after its last checkpoint is then there twice, with the same numbers.

    Example:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x",
        ...        hooks=[rx.MLflow("http://host:5000", experiment="digits")])

    Args:
        uri: of the tracking server or store; files in `mlflow` in the run's folder by default.
        experiment: its name; it is made where there is none.

    Raises:
        MissingDependencyError: in a run, mlflow is not installed.
        ConfigError: in a run, neither a `uri` nor a folder.
    """

    package = "mlflow"

    def __init__(self, uri: str | None = None, *, experiment: str = "replicax") -> None:
        self._uri, self._experiment = uri, experiment
        self._where: str | None = None
        self._id: str | None = None
        self._client: Any = None

    def start(self, run: Running) -> None:
        self._where = self._uri
        if run.is_main and self._uri is None:
            self._where = on_disk(run, None, FOLDER, "MLflow()").absolute().as_uri()
        super().start(run)

    def open(self, start: Start) -> None:
        mlflow = require("mlflow", "loggers")
        if self._uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # else it wants a database
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

    def end(self, run: Running) -> None:
        super().end(run)
        self._id = None  # of this run; there may be another

    def save_state(self) -> Any:
        return self._id

    def load_state(self, state: Any) -> None:
        self._id = state


def _name(name: str) -> str:
    """A name as MLflow takes it."""
    return _NOT_IN_NAMES.sub("_", name)


def _params(config: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a configuration, by names such as `recipe.width`."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _params(value, f"{prefix}{name}.")
        else:
            yield _name(f"{prefix}{name}"), str(value)[:_LONGEST]

"""`TensorBoard`: the records of a run as event files."""

import json
import time
from pathlib import Path
from typing import Any

from replicax.train.hook import Running
from replicax.train.hooks.folder import on_disk
from replicax.train.loggers.logger import Logger, Start, scalars
from replicax.train.records import Record

FOLDER = "tensorboard"


class TensorBoard(Logger):
    """Writes event files for TensorBoard: metrics and figures by step, and the configuration.

    What a killed start did after its last checkpoint is left out by TensorBoard once the run goes
    on from there.

    Example:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x",
        ...        hooks=[rx.TensorBoard()])  # then: tensorboard --logdir runs

    Args:
        folder: `tensorboard` in the run's folder by default.

    Raises:
        MissingDependencyError: in a run, tensorboardX is not installed.
        ConfigError: in a run, no folder.
    """

    package = "tensorboardX"

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder, self._path = folder, Path()
        self._writer: Any = None

    def start(self, run: Running) -> None:
        if run.is_main:
            self._path = on_disk(run, self._folder, FOLDER, "TensorBoard()")
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

        # A file that could not be written ends there, and another one begins. The name starts with
        # the second; two starts within one must not be one file.
        writer, self._writer = self._writer, None
        if writer is None:
            writer = EventsWriter(str(self._path / "events"), f".{time.time_ns()}")
        writer.write_event(Event(wall_time=time.time(), step=step, **what))
        writer.flush()
        self._writer = writer

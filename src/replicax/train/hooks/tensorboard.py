"""`TensorBoard`, a logger that writes event files."""

import json
import time
from pathlib import Path
from typing import Any

from replicax.text.arguments import typed
from replicax.train.files.places import on_disk, shown
from replicax.train.files.records import Record
from replicax.train.hooks.hook import Running
from replicax.train.hooks.logger import Logger, Start, scalars


class TensorBoard(Logger):
    """Writes event files for TensorBoard: metrics and figures by step, and the configuration.

    When a run resumes, TensorBoard hides the steps that a killed process did after the checkpoint.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x",
        ...        hooks=[rx.hooks.TensorBoard()])  # then: tensorboard --logdir runs

    Args:
        folder: `tensorboard` in the run's folder by default.

    Raises:
        MissingDependencyError: in a run, tensorboard is not installed.
        ConfigError: in a run, no folder.
    """

    package = extra = "tensorboard"

    @typed
    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder, self._path = folder, Path()
        self._writer: Any = None

    def start(self, run: Running) -> None:
        if run.is_main:
            self._path = on_disk(run.folder, self._folder, "tensorboard", "TensorBoard()")
        super().start(run)

    def open(self, start: Start) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._path.mkdir(parents=True, exist_ok=True)
        self.go_back(start)
        config = json.dumps(start.config, indent=2, default=str)
        self._add(start.step, summary=text_pb("config", f"```json\n{config}\n```"))
        self.looked_at = f"tensorboard --logdir {shown(self._path)}"

    def write(self, record: Record) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=v) for name, v in scalars(record).items()]
        self._add(record.step, summary=Summary(value=values))

    def go_back(self, start: Start) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(start.step + 1, session_log=SessionLog(status=SessionLog.START))

    def close(self, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, step: int, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # After a failed write, continue in a new file. File names begin with the time in seconds,
        # so the suffix separates two starts within one second.
        writer, self._writer = self._writer, None
        if writer is None:
            writer = EventFileWriter(str(self._path), filename_suffix=f".{time.time_ns()}")
        writer.add_event(Event(wall_time=time.time(), step=step, **what))
        writer.flush()
        self._writer = writer

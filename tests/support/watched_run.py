"""A run as its hooks see it, without a step: it keeps what they ask and say."""

from pathlib import Path
from typing import Any

from replicax.train.dispatched import RunPosition
from replicax.train.files.records import Record
from replicax.train.hooks.hook import Hook


class WatchedRun:
    """A run of no steps; `evaluated` and `trained` make its records and show them to `hook`."""

    def __init__(self, hook: Hook, folder: Path | None = None, *, is_main: bool = True) -> None:
        self.hook, self.folder, self.is_main = hook, folder, is_main
        self.place = RunPosition(0, 0, 0)
        self.records: list[Record] = []
        self.config: dict[str, Any] = {"recipe": {"width": 3}, "seed": 0}
        self.error: BaseException | None = None
        self.lines: list[str] = []
        self.stopped: list[str] = []
        self.saves = 0

    def say(self, line: str) -> None:
        self.lines.append(line)

    def alarm(self, line: str) -> None:
        self.lines.append(f"ALARM  {line}")

    def stop(self, why: str) -> None:
        self.stopped.append(why)

    def save(self) -> None:
        self.saves += 1

    def evaluated(self, step: int, **metrics: float) -> None:
        self.place = RunPosition(step, 0, step)
        record = self._keep(Record("eval", step, 0, metrics, 10, 0.5))
        self.hook.evaluation(self, record)

    def trained(self, step: int, seconds: float = 0.5, **metrics: float) -> Record:
        self.place = RunPosition(step, 0, step)
        return self._keep(Record("train", step, 0, metrics, 10, seconds))

    def go_back(self, step: int, records: int, state: Any = None) -> None:
        """As a run does: to `step`, with the first `records`."""
        self.place = RunPosition(step, 0, step)
        del self.records[records:]
        if state is not None:
            self.hook.load_state(state)
        self.hook.rewound(self)

    def _keep(self, record: Record) -> Record:
        self.records.append(record)
        self.hook.record(self, record)
        return record

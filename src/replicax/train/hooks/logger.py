"""`Logger`: a hook that hands the records of a run to a thread of its own; `CSV` is one."""

import csv
import dataclasses
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from replicax.errors import require
from replicax.train.hook import Hook, Running
from replicax.train.places import on_disk
from replicax.train.records import Record
from replicax.wording import first_line

MOST_WAITING = 1000
"""Records that wait to be sent; more are dropped."""
END_SECONDS = 10.0
"""For what still waits when the run ends."""
SLOW_SECONDS = 30.0
"""Without an answer, after which it is said that there is none."""
FILE = "records.csv"
_FIRST = ("kind", "step", "epoch", "rows", "seconds")


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a start of a run begins, or goes on from after it went back."""

    folder: Path | None
    """The run's folder."""
    config: dict[str, Any]
    """The contents of `config.json`."""
    step: int
    """Updates done in the whole run."""
    records: tuple[Record, ...]
    """Records of the whole run."""


class Logger(Hook):
    """A hook that sends records elsewhere: override `write`, and `open` and `close` where needed.

    They are called by a thread of the logger's own, in process 0 alone, and cost no step. What they
    raise is said once and does no harm: the record is dropped and counted, and the next one is
    tried. Where more than 1,000 wait, the next are dropped too. At the end what still waits is
    sent, for 10 seconds at most.

    Examples:
        >>> class Post(rx.Logger):
        ...     def write(self, record):
        ...         requests.post("http://host:8000", data=record.to_json(), timeout=5)
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, hooks=[Post()])
    """

    package = ""
    """A package that it needs, imported as the run begins."""

    _thread: threading.Thread | None = None
    _queue: "queue.SimpleQueue[tuple[str, Any] | None]"
    _given = _sent = 0  # records
    _asked_at: float | None = None  # when the thread began with what it does
    _fault: str | None = None  # the first fault
    _told = False

    def open(self, start: Start) -> None:
        """Make ready; called again before each record until it succeeds."""

    def write(self, record: Record) -> None:
        """Send a record."""

    def go_back(self, start: Start) -> None:
        """Forget what came after `start`, where that can be done."""

    def close(self, error: BaseException | None) -> None:
        """Let go of what was opened; the run may have failed with `error`."""

    def start(self, run: Running) -> None:
        if not run.is_main:
            return
        if self.package:
            require(self.package, "loggers")
        self._queue, self._given, self._sent = queue.SimpleQueue(), 0, 0
        self._fault, self._told, self._asked_at = None, False, None
        given, name = (_start(run),), f"replicax-{self.name}"
        self._thread = threading.Thread(target=self._work, args=given, name=name, daemon=True)
        self._thread.start()

    def record(self, run: Running, record: Record) -> None:
        if self._thread is None:
            return
        self._given += 1
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put(("write", record))
        else:
            self._fault = self._fault or f"{MOST_WAITING:,} records wait"
        asked_at = self._asked_at
        if asked_at is not None and time.monotonic() - asked_at > SLOW_SECONDS:
            self._fault = self._fault or f"no answer in {SLOW_SECONDS:.0f} s"
        self._tell(run)

    def rewound(self, run: Running) -> None:
        if self._thread is not None:
            self._queue.put(("go_back", _start(run)))

    def end(self, run: Running) -> None:
        if self._thread is None:
            return
        self._queue.put(("close", run.error))
        self._queue.put(None)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            self._fault = self._fault or f"no answer in {END_SECONDS:.0f} s at the end"
        self._thread = None
        self._tell(run)
        if self._sent < self._given:
            lost = self._given - self._sent
            run.say(f"{self.name}: {lost:,} of {self._given:,} records were dropped")

    def _work(self, start: Start) -> None:
        """Do what comes, in order, in the logger's thread."""
        opened = self._try("open", start)
        while (task := self._queue.get()) is not None:
            point, argument = task
            start = argument if point == "go_back" else start
            opened = opened or (point == "write" and self._try("open", start))
            if opened and self._try(point, argument):
                self._sent += point == "write"

    def _try(self, point: str, argument: Any) -> bool:
        self._asked_at = time.monotonic()
        try:
            getattr(self, point)(argument)
        except Exception as error:  # of whatever it talks to
            self._fault = self._fault or first_line(error)
            return False
        finally:
            self._asked_at = None
        return True

    def _tell(self, run: Running) -> None:
        if self._fault is not None and not self._told:
            self._told = True
            run.say(
                f"ALARM  {self.name}: {self._fault}; records are dropped, and the run is as it was"
            )


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record, by names such as `train/loss` and `eval/rows_per_second`."""
    numbers = {**record.metrics, **(record.figures or {}), "epoch": float(record.epoch)}
    if record.seconds > 0:
        numbers["rows_per_second"] = record.rows_per_second
    return {f"{record.kind}/{name}": value for name, value in numbers.items()}


def _start(run: Running) -> Start:
    return Start(run.folder, run.config, run.place.step, tuple(run.records))


class CSV(Logger):
    """Writes all records of a run into a CSV file, a row each; metrics and figures are columns.

    The file is always that of the whole run: it is written anew where the run goes on from a
    checkpoint or goes back, and where a record brings a new column.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x", hooks=[rx.CSV()])

    Args:
        path: `records.csv` in the run's folder by default.

    Raises:
        ConfigError: in a run, neither a `path` nor a folder.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._wanted = path
        self._path = Path()
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] = []  # columns of the file

    def start(self, run: Running) -> None:
        if run.is_main:
            self._path = on_disk(run.folder, self._wanted, FILE, "CSV()")
        super().start(run)

    def open(self, start: Start) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.go_back(start)

    def go_back(self, start: Start) -> None:
        self._rows = [_row(record) for record in start.records]
        self._write_all()

    def write(self, record: Record) -> None:
        row = _row(record)
        self._rows.append(row)
        if not row.keys() <= set(self._columns):
            return self._write_all()
        columns, self._columns = self._columns, []  # where this fails, all is written next time
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, columns).writerow(row)
        self._columns = columns

    def _write_all(self) -> None:
        columns = list(dict.fromkeys([*_FIRST, *(name for row in self._rows for name in row)]))
        beside = self._path.with_name(f"{self._path.name}.new")
        with beside.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, columns)
            table.writeheader()
            table.writerows(self._rows)
        os.replace(beside, self._path)
        self._columns = columns


def _row(record: Record) -> dict[str, Any]:
    first = {name: getattr(record, name) for name in _FIRST}
    return {**record.metrics, **(record.figures or {}), **first}

"""`Logger`, a hook that processes a run's records in a background thread, and `CSV`."""

import csv
import dataclasses
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

from replicax.errors import require
from replicax.text.arguments import typed
from replicax.text.wording import first_line
from replicax.train.files.places import check_replaceable, on_disk, shown
from replicax.train.files.records import Record
from replicax.train.hooks.hook import Hook, Running

MOST_WAITING = 1000
"""Maximum number of queued records; further ones are dropped."""
END_SECONDS = 10.0
"""Timeout for sending queued records when the run ends."""
SLOW_SECONDS = 30.0
"""Time without a response after which an alarm is printed."""
_FILE = "records.csv"
_FIRST = ("kind", "step", "epoch", "rows", "seconds")


@dataclasses.dataclass(frozen=True)
class Start:
    """The point from which a run starts, resumes, or continues after going back."""

    folder: Path | None
    """The run's folder."""
    config: dict[str, Any]
    """The contents of `config.json`."""
    step: int
    """Steps done in the whole run."""
    records: tuple[Record, ...]
    """Records of the whole run."""


class Logger(Hook):
    """A hook that sends records elsewhere: override `write`, and `open` and `close` if needed.

    They are called in a background thread of process 0 and do not delay steps. If they raise, the
    first error is printed, the record is dropped and counted, and the next one is tried. When more
    than 1,000 records are queued, further ones are dropped as well. At the end of the run, queued
    records are sent for at most 10 seconds.

    Examples:
        >>> class Post(rx.hooks.Logger):
        ...     def write(self, record):
        ...         requests.post("http://host:8000", data=record.to_json(), timeout=5)
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, hooks=[Post()])
    """

    package = ""
    """A required package, imported when the run begins."""
    extra = ""
    """The extra of Replicax with that package, if there is one."""

    looked_at: str | None = None
    """A command or an address that shows what was sent; set it in `open`. The end prints it."""

    _thread: threading.Thread | None = None
    _queue: "queue.SimpleQueue[tuple[str, Any] | None]"
    _given = _sent = 0  # records
    _asked_at: float | None = None  # when the thread began its current call
    _fault: str | None = None  # the first fault
    _told = False

    def open(self, start: Start) -> None:
        """Prepare for writing; retried before each record until it succeeds."""

    def write(self, record: Record) -> None:
        """Send a record."""

    def go_back(self, start: Start) -> None:
        """Discard records after `start`, if possible."""

    def close(self, error: BaseException | None) -> None:
        """Release resources; `error` is the exception the run failed with, if any."""

    def check_installed(self) -> None:
        """Raise `MissingDependencyError` if the required package is missing."""
        if self.package:
            require(self.package, self.extra)

    def before_run(self, run: Running) -> None:
        if run.is_main:
            self.check_installed()

    def start(self, run: Running) -> None:
        if not run.is_main:
            return
        self._queue, self._given, self._sent = queue.SimpleQueue(), 0, 0
        self._fault, self._told, self._asked_at, self.looked_at = None, False, None, None
        given, name = (_start(run),), f"replicax-{self.name}"
        self._thread = threading.Thread(target=self._work, args=given, name=name, daemon=True)
        self._thread.start()

    def take_over(self, run: Running) -> None:
        self.start(run)

    def record(self, run: Running, record: Record) -> None:
        if self._thread is None:
            return
        self._given += 1
        if self._queue.qsize() < MOST_WAITING:
            self._queue.put(("write", record))
        else:
            self._fault = self._fault or f"{MOST_WAITING:,} records queued"
        asked_at = self._asked_at  # once: the thread sets it to None meanwhile
        if asked_at is not None and time.monotonic() - asked_at > SLOW_SECONDS:
            self._fault = self._fault or f"no response in {SLOW_SECONDS:.0f} s"
        self._tell(run)

    def rewound(self, run: Running) -> None:
        if self._thread is not None:
            self._queue.put(("go_back", _start(run)))

    def summary(self) -> list[str]:
        return [] if self.looked_at is None else [f"see    {self.looked_at}"]

    def end(self, run: Running) -> None:
        if self._thread is None:
            return
        self._queue.put(("close", run.error))
        self._queue.put(None)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            self._fault = self._fault or f"no response in {END_SECONDS:.0f} s at the end"
        self._thread = None
        self._tell(run)
        if self._sent < self._given:
            lost = self._given - self._sent
            run.say(f"{self.name}: {lost:,} of {self._given:,} records were dropped")

    def _work(self, start: Start) -> None:
        """Process queued tasks in order, in the logger's thread."""
        opened = self._try("open", start)
        while (task := self._queue.get()) is not None:
            point, argument = task
            start = argument if point == "go_back" else start
            # Nothing to take back, or to close, of what could not be opened.
            opened = opened or (point == "write" and self._try("open", start))
            if opened and self._try(point, argument):
                self._sent += point == "write"

    def _try(self, point: str, argument: Any) -> bool:
        self._asked_at = time.monotonic()
        try:
            getattr(self, point)(argument)
        except Exception as error:  # any error of the service it talks to
            self._fault = self._fault or first_line(error)
            return False
        finally:
            self._asked_at = None
        return True

    def _tell(self, run: Running) -> None:
        if self._fault is not None and not self._told:
            self._told = True
            run.alarm(f"{self.name}: {self._fault}; records are dropped, the run is unaffected")


def scalars(record: Record) -> dict[str, float]:
    """Return a record's numbers by names such as `train/loss` and `eval/rows_per_second`."""
    numbers = {**record.metrics, **(record.figures or {}), "epoch": float(record.epoch)}
    if record.seconds > 0:
        numbers["rows_per_second"] = record.rows_per_second
    return {f"{record.kind}/{name}": value for name, value in numbers.items()}


def _start(run: Running) -> Start:
    return Start(run.folder, run.config, run.place.step, tuple(run.records))


class CSV(Logger):
    """Writes a run's records to a CSV file, one per row; metrics and figures are columns.

    The file always covers the whole run: it is rewritten when the run resumes from a checkpoint or
    goes back, and when a record adds a column.

    Examples:
        >>> hooks = [rx.hooks.CSV()]
        >>> rx.fit(dp, state, source, batch_size=32, epochs=1, run_dir="runs/x", hooks=hooks)

    Args:
        path: `records.csv` in the run's folder by default.

    Raises:
        ConfigError: in a run, neither a `path` nor a folder.
    """

    @typed
    def __init__(self, path: str | Path | None = None) -> None:
        self._wanted = path
        self._path = Path()
        self._rows: list[dict[str, Any]] = []
        self._columns: list[str] = []  # columns of the file

    def start(self, run: Running) -> None:
        if run.is_main:
            self._path = on_disk(run.folder, self._wanted, _FILE, "CSV()")
            check_replaceable(self._path)
        super().start(run)

    def open(self, start: Start) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.go_back(start)
        self.looked_at = shown(self._path)

    def go_back(self, start: Start) -> None:
        self._rows = [_row(record) for record in start.records]
        self._write_all()

    def write(self, record: Record) -> None:
        row = _row(record)
        self._rows.append(row)
        if not row.keys() <= set(self._columns):
            return self._write_all()
        columns, self._columns = self._columns, []  # if this fails, all rows are written next time
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, columns).writerow(row)
        self._columns = columns

    def _write_all(self) -> None:
        columns = list(dict.fromkeys([*_FIRST, *(name for row in self._rows for name in row)]))
        beside = self._path.with_name(f"{self._path.name}.new")
        beside.unlink(missing_ok=True)  # it may be a link
        with beside.open("x", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, columns)
            table.writeheader()
            table.writerows(self._rows)
        os.replace(beside, self._path)
        self._columns = columns


def _row(record: Record) -> dict[str, Any]:
    first = {name: getattr(record, name) for name in _FIRST}
    return {**record.metrics, **(record.figures or {}), **first}

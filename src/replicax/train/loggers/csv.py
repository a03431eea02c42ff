"""`CSV`: the records of a run as a table."""

import csv
import os
from pathlib import Path
from typing import Any

from replicax.train.hook import Running
from replicax.train.hooks.folder import on_disk
from replicax.train.loggers.logger import Logger, Start
from replicax.train.records import Record

FILE = "records.csv"

_FIRST = ("kind", "step", "epoch", "rows", "seconds")


class CSV(Logger):
    """Writes all records of a run into a CSV file, a row each; metrics and figures are columns.

    The file is always that of the whole run: it is written anew where the run goes on from a
    checkpoint or goes back, and where a record brings a new column.

    Example:
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
        self._columns: list[str] = []
        """Columns of the file."""

    def start(self, run: Running) -> None:
        if run.is_main:
            self._path = on_disk(run, self._wanted, FILE, "CSV()")
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

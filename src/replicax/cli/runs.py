"""`replicax runs`: what is in runs/, and how far each run has come."""

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from replicax.cli.flags import BY_PLACE, parse, shown_as
from replicax.cli.opened import RUNS, metrics_text
from replicax.errors import CheckpointError, ConfigError
from replicax.train.changes import read_config
from replicax.train.checkpoints.manifest import Manifest
from replicax.train.checkpoints.store import Store
from replicax.train.lease import is_held
from replicax.train.load import CHECKPOINTS
from replicax.train.records import CONFIG, RECORDS, Record, record_from_json
from replicax.wording import size_text

WIDTH, GAP, LEAST_NAME, LEAST_RECIPE = 80, 2, 8, 8
HEADER = ("name", "recipe", "step", "epoch", "eval", "saved", "size", "")
_MOST_RECORD_BYTES = 2**22
_AGES = (("d", 86_400), ("h", 3_600), ("min", 60))
_NO_RECORD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Lists the runs in a folder, the one saved last at the end.

    Step and epoch are those of the newest checkpoint. done: it has come as far as it was to go;
    stopped: it has not; running: a start holds it; ?: how far it was to go is not known, as it was
    made by a program of your own. Checkpoints are not verified: loading one does that.
    """

    folder: Annotated[Path, BY_PLACE, shown_as("FOLDER", "runs")] = RUNS
    """Where to look."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A run in the table."""

    name: str
    saved_at: float = 0.0
    cells: tuple[str, ...] = ()
    """Recipe, step, epoch, size and state; none where the run cannot be read."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    fault: str = ""
    """Why it cannot be read."""


def runs(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("runs", RunsOptions, arguments)
    folder = options.folder
    if not folder.is_dir():
        if folder == RUNS:
            raise ConfigError("there is no folder runs here; replicax train makes it: train one")
        raise ConfigError(f"{folder} is no folder; give one that holds runs")
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    found = [path for path in inside if os.path.lexists(path / CONFIG) or _store(path).paths()]
    rows = sorted(map(_row, found), key=lambda row: row.saved_at)
    if rows:
        print(*_table(rows, time.time()), sep="\n")
    others = len(inside) - len(found)
    if others or not rows:
        runs_there = f"{len(rows)} run{'s' * (len(rows) != 1)} in {folder}"
        print(f"{runs_there}, and {others} other folder{'s' * (others != 1)}")
    return 0


def _row(path: Path) -> Row:
    try:
        config = read_config(path / CONFIG)
    except ConfigError:
        return Row(path.name, fault=f"its {CONFIG} cannot be read")
    records = _records(path / RECORDS)
    evaluated = [record for record in records if record.kind == "eval"]
    metrics = evaluated[-1].metrics if evaluated else {}
    step = records[-1].step if records else 0
    epoch = records[-1].epoch if records else 0
    manifest, saved_at = None, 0.0
    store = _store(path)
    if places := store.paths():
        try:
            manifest = store.read_placed(*places[-1])
        except CheckpointError as error:
            return Row(path.name, fault=f"{places[-1][1].name} is harmed: {error}")
        step, epoch = manifest.position.step, manifest.position.epoch
        saved_at = manifest.saved_at
    of_steps, of_epochs = _length(config)
    state = "running" if is_held(path) else _state(config, manifest)
    cells = (
        str(config.get("recipe") or "-"),
        f"{step}/{of_steps}" if of_steps else str(step),
        f"{epoch + 1}/{of_epochs}" if of_epochs else str(epoch + 1),
        size_text(_bytes(path)),
        state,
    )
    return Row(path.name, saved_at, cells, metrics)


def _store(path: Path) -> Store:
    """Its checkpoints."""
    return Store(path / CHECKPOINTS, keep=1, keep_every=None)


def _records(path: Path) -> list[Record]:
    """The last records, without what is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.path.getsize(path) - _MOST_RECORD_BYTES))
            lines = file.read(_MOST_RECORD_BYTES).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(record_from_json(line))
        except _NO_RECORD:  # cut off by a kill
            continue
    return found


def _length(config: dict[str, Any]) -> tuple[int | None, int | None]:
    """Steps, or epochs, that the run was to have; neither where it was no recipe's."""
    options, fields = config.get("options"), config.get("fields")
    if not isinstance(options, dict) or not isinstance(fields, dict):
        return None, None
    steps, epochs = options.get("steps"), fields.get("epochs")
    if type(steps) is int:
        return steps, None
    return None, epochs if type(epochs) is int else None


def _state(config: dict[str, Any], manifest: Manifest | None) -> str:
    steps, epochs = _length(config)
    data = config.get("data")
    rows = data.get("rows") if isinstance(data, dict) else None
    if manifest is None:
        return "?"
    position = manifest.position
    if steps is not None:
        return "done" if position.step >= steps else "stopped"
    if epochs is None or type(rows) is not int:
        return "?"
    done = position.epoch + 1 >= epochs and position.rows >= rows
    return "done" if done else "stopped"


def _bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # deleted meanwhile
                continue
    return total


def _table(rows: Sequence[Row], now: float) -> list[str]:
    """In 80 columns: all metrics where there is room, the loss alone where there is not."""
    longest = max(len(row.name) for row in rows)
    for kept in (None, {"loss"}):
        lines = [HEADER, *(_cells(row, now, kept) for row in rows if not row.fault)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
        room = WIDTH - sum(widths[2:]) - GAP * (len(HEADER) - 1)  # for name and recipe
        if room >= longest + widths[1]:
            break
    widths[1] = min(widths[1], max(LEAST_RECIPE, room - longest))
    widths[0] = min(longest, max(LEAST_NAME, room - widths[1]))
    found = [_line(HEADER, widths)]
    for row in rows:
        name = _shortened(row.name, widths[0])
        if row.fault:
            found.append(f"{name:<{widths[0]}}{' ' * GAP}{row.fault}"[:WIDTH])
        else:
            recipe, *rest = _cells(row, now, kept)[1:]
            found.append(_line((name, _shortened(recipe, widths[1]), *rest), widths))
    return found


def _cells(row: Row, now: float, kept: set[str] | None) -> tuple[str, ...]:
    recipe, step, epoch, size, state = row.cells
    metrics = {name: value for name, value in row.metrics.items() if kept is None or name in kept}
    saved = _age(now - row.saved_at) if row.saved_at else "-"
    return row.name, recipe, step, epoch, metrics_text(metrics) or "-", saved, size, state


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)]
    return (" " * GAP).join(padded).rstrip()


def _age(seconds: float) -> str:
    for unit, size in _AGES:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return "now"


def _shortened(text: str, most: int) -> str:
    """The middle is what goes: the ends tell runs apart."""
    if len(text) <= most:
        return text
    before = (most - 1) // 2
    return f"{text[:before]}…{text[len(text) - (most - 1 - before) :]}"

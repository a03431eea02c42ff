"""`replicax runs`: list the runs in runs/ and their progress."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from replicax.cli.flags import BY_PLACE, parse, shown_as
from replicax.cli.output import RUNS
from replicax.errors import CheckpointError, ConfigError, require
from replicax.table import WIDTH, rendered
from replicax.train.changes import read_config
from replicax.train.checkpoints.store import CHECKPOINTS, Store
from replicax.train.goodput import FILE as GOODPUT
from replicax.train.goodput import read_goodput
from replicax.train.lease import is_held
from replicax.train.places import read_end
from replicax.train.records import CONFIG, RECORDS, Record, record_from_json
from replicax.train.summary import metrics_text
from replicax.wording import UNKNOWN, counted, shortened, size_text

HEADER = ("name", "recipe", "step", "epoch", "eval", "saved", "size", "used", "")
_MOST_RECORD_BYTES = 2**22
_AGES = (("d", 86_400), ("h", 3_600), ("min", 60))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Lists the runs in a folder, the most recently saved last.

    Step and epoch are those of the newest checkpoint. done: the run reached its end; stopped: it
    did not; running: a process is writing to it; ?: its length is unknown, because it was created
    by your own program. used is the productive share of the time since the first start. Checkpoints
    are not verified here; loading one verifies it.
    """

    folder: Annotated[Path, BY_PLACE, shown_as("[FOLDER]", "runs")] = RUNS
    """Folder to list."""


def runs(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    folder = parse("runs", RunsOptions, arguments).folder
    if not folder.is_dir():
        if folder == RUNS:
            raise ConfigError("no folder runs here; replicax train creates it: train a recipe")
        raise ConfigError(f"{folder} is not a folder; give a folder of runs")
    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    folders = [path for path in inside if os.path.lexists(path / CONFIG) or _store(path).paths()]
    rows, faults = [], []
    for path in folders:
        try:
            rows.append(_row(path))
        except ConfigError:
            faults.append(f"{path.name}  its {CONFIG} cannot be read")
        except CheckpointError as error:
            text = f"{path.name}  its newest checkpoint is damaged: {error}"
            faults.append(shortened(text, WIDTH))
    table = _table([cells for _, cells in sorted(rows, key=lambda row: row[0])]) if rows else []
    for line in (*table, *faults):
        print(line)
    others = len(inside) - len(folders)
    if others or not folders:
        print(f"{counted(len(folders), 'run')} in {folder}, and {counted(others, 'other folder')}")
    return 0


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines of 80 columns; long names and many metrics are wrapped."""
    require("rich", "cli")
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
    for title in HEADER:
        table.add_column(title, overflow="fold", no_wrap=title not in ("name", "recipe", "eval"))
    for row in rows:
        table.add_row(*row)
    return rendered(table)


def _row(path: Path) -> tuple[float, tuple[str, ...]]:
    """Return when the run was saved, and its line of the table."""
    records, manifest = _records(path / RECORDS), None
    evaluated = [record.metrics for record in records if record.kind == "eval"]
    step, epoch, saved_at = 0, 0, 0.0
    if records:
        step, epoch = records[-1].step, records[-1].epoch
    if places := _store(path).paths():
        manifest = _store(path).read_placed(*places[-1])
        step, epoch, saved_at = manifest.position.step, manifest.position.epoch, manifest.saved_at
    if manifest is not None and not os.path.lexists(path / CONFIG):
        config = manifest.config
    else:
        config = read_config(path / CONFIG)
    spent = read_goodput(path / GOODPUT)
    steps = epochs = rows = None
    if config.get("recipe"):  # otherwise the other entries are unknown
        steps, rows = _number(config, "options", "steps"), _number(config, "data", "rows")
        epochs = _number(config, "fields", "epochs") if steps is None else None
    state = "?"
    if is_held(path):
        state = "running"
    elif manifest and (steps is not None or None not in (epochs, rows)):
        at = manifest.position
        done = at.step >= steps if steps is not None else (at.epoch + 1, at.rows) >= (epochs, rows)
        state = "done" if done else "stopped"
    return saved_at, (
        path.name,
        str(config.get("recipe") or UNKNOWN),
        f"{step}/{steps}" if steps else str(step),
        f"{epoch + 1}/{epochs}" if epochs else str(epoch + 1),
        (metrics_text(evaluated[-1]) if evaluated else "") or UNKNOWN,
        _age(time.time() - saved_at) if saved_at else UNKNOWN,
        size_text(_bytes(path)),
        UNKNOWN if spent is None else f"{spent.clock_fraction:.0%}",
        state,
    )


def _store(path: Path) -> Store:
    return Store(path / CHECKPOINTS, keep=1, keep_every=None)


def _records(path: Path) -> list[Record]:
    """Return the last records, skipping invalid lines: a killed process truncates one."""
    records: list[Record] = []
    with contextlib.suppress(OSError):
        for line in read_end(path, _MOST_RECORD_BYTES).splitlines():
            with contextlib.suppress(ValueError):
                records.append(record_from_json(line))
    return records


def _number(config: dict[str, Any], section: str, name: str) -> int | None:
    values = config.get(section)
    value = values.get(name) if isinstance(values, dict) else None
    return value if type(value) is int else None


def _bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # deleted meanwhile
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _age(seconds: float) -> str:
    return next((f"{seconds / size:.0f} {unit}" for unit, size in _AGES if seconds >= size), "now")

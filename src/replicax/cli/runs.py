"""`replicax runs`: list the runs in runs/ and their progress."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from replicax.cli.flags import BY_PLACE, parse, shown_as
from replicax.cli.output import RUNS, show
from replicax.errors import CheckpointError, ConfigError
from replicax.text.table import NO_BREAK, WIDTH, aligned, width, wrapped
from replicax.text.wording import UNKNOWN, counted, size_text
from replicax.train.checkpoints.store import CHECKPOINTS, Store
from replicax.train.files.lease import is_held
from replicax.train.files.places import read_end
from replicax.train.files.records import CONFIG, RECORDS, Record, record_from_json
from replicax.train.folder.changes import read_config
from replicax.train.folder.goodput import FILE as GOODPUT
from replicax.train.folder.goodput import read_goodput
from replicax.train.hooks.record_lines import metrics_text
from replicax.train.run.summary import LENGTH

_STATE = ""
"""The column of the state, which has no heading."""
_MOST_RECORD_BYTES = 2**22
_SHORT = 24
_AGES = (("d", 86_400), ("h", 3_600), ("min", 60))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunsOptions:
    """Lists the runs in a folder, the most recently saved last.

    Step and epoch are those of the newest checkpoint; an evaluation of another step says of which.
    done: the run reached its end; stopped: it did not; running: a process is writing to it; ?: it
    saved nothing that tells. used is the productive share of the time since the first start.
    Checkpoints are not verified here; loading one verifies it.
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
    rows, faults = list[_Row](), []
    for path in folders:
        try:
            rows.append(_row(path))
        except ConfigError:
            faults.append(f"{path.name}  its {CONFIG} cannot be read")
        except CheckpointError as error:
            faults.append(f"{path.name}  its newest checkpoint is damaged: {error}")
    show(*_table(sorted(rows, key=lambda row: row.saved_at)))
    for fault in faults:
        show(*wrapped(fault, width(), "  "))
    others = len(inside) - len(folders)
    if others or not folders:
        show(f"{counted(len(folders), 'run')} in {folder}, and {counted(others, 'other folder')}")
    return 0


@dataclasses.dataclass(frozen=True)
class _Row:
    saved_at: float
    name: str
    cells: Mapping[str, str]
    """Heading -> text; empty if there is nothing to tell."""


def _table(rows: Sequence[_Row]) -> list[str]:
    """Return a line for each run, or a paragraph if one has no room: no name is broken."""
    if not rows:
        return []
    heads = ["name", *rows[0].cells]
    cells = [[row.name, *(text or UNKNOWN for text in row.cells.values())] for row in rows]
    lines = aligned([heads, *cells], left=len(heads))
    if width() >= max(WIDTH, *map(len, lines)):
        return lines
    return [line for row in rows for line in _paragraph(row)]


def _paragraph(row: _Row) -> Iterator[str]:
    """Yield the lines of a run: its name, which can be copied, and below it the rest."""
    yield row.name
    told = [
        row.cells[_STATE],
        *(f"{head} {text}" for head, text in row.cells.items() if text and head != _STATE),
    ]
    kept = " · ".join(each.replace(" ", NO_BREAK) if len(each) <= _SHORT else each for each in told)
    yield from wrapped(kept, width(), "  ", "  ")


def _row(path: Path) -> _Row:
    records, manifest = _records(path / RECORDS), None
    scored = next((record for record in reversed(records) if record.kind == "eval"), None)
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
    epochs, steps = (_number(config, "start", name) for name in LENGTH)
    state = "?"
    if is_held(path):
        state = "running"
    elif manifest and (steps or epochs):
        at = manifest.position
        ended = epochs is not None and epoch + 1 >= epochs and at.evaluated_step == step
        state = "done" if ended or (steps is not None and step >= steps) else "stopped"
    figures = "" if scored is None else metrics_text(scored.metrics)
    if scored is not None and scored.step != step:
        figures = f"of step {scored.step}: {figures}"
    return _Row(
        saved_at,
        path.name,
        {
            "recipe": str(config.get("recipe") or ""),
            "step": f"{step}/{steps}" if steps else str(step),
            "epoch": f"{epoch + 1}/{epochs}" if epochs else str(epoch + 1),
            "eval": figures,
            "saved": _age(time.time() - saved_at) if saved_at else "",
            "size": size_text(_bytes(path)),
            "used": "" if spent is None else f"{spent.clock_fraction:.0%}",
            _STATE: state,
        },
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

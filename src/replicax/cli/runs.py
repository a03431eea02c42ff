"""`replicax runs`: list the runs in runs/ and their progress."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from replicax.cli.flags import BY_PLACE, OPTIONAL_PATH, parse
from replicax.cli.output import RUNS, JsonOptions
from replicax.errors import CheckpointError, ConfigError
from replicax.text.table import NO_BREAK, WIDTH, aligned, width, wrapped
from replicax.text.wording import UNKNOWN, counted, size_text
from replicax.train.checkpoints.store import CHECKPOINTS, Store
from replicax.train.files.lease import is_held
from replicax.train.files.places import read_end
from replicax.train.files.records import CONFIG, RECORDS, Record, plain_config, record_from_json
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
class RunsOptions(JsonOptions):
    """Lists the runs in a folder, the most recently saved last.

    Step and epoch are those of the newest checkpoint; an evaluation of another step says of which.
    done: the run reached its end; stopped: it did not; running: a process is writing to it; ?: it
    saved nothing that tells. used is the productive share of the time since the first start.
    Checkpoints are not verified here; loading one verifies it.
    """

    folder: Annotated[Path, BY_PLACE, OPTIONAL_PATH] = RUNS
    """Folder to list."""


def runs(arguments: list[str]) -> int:
    """Run the command; return its exit code."""
    options = parse("runs", RunsOptions, arguments)
    with options.working():
        content = _listed(options.folder, options.say)
    options.write_json(content)
    return 0


def _listed(folder: Path, say: Callable[..., None]) -> dict[str, Any]:
    """Print the runs in a folder; return them as JSON values."""
    if not folder.is_dir() and folder != RUNS:  # which the first run creates
        raise ConfigError(f"{folder} is not a folder; give a folder of runs")
    inside = sorted(path for path in folder.glob("*") if path.is_dir())
    folders = [path for path in inside if os.path.lexists(path / CONFIG) or _store(path).paths()]
    rows, faults = list[_Row](), []
    for path in folders:
        try:
            rows.append(_row(path))
        except ConfigError:
            faults.append(f"{path.name}  its {CONFIG} cannot be read")
        except CheckpointError as error:
            faults.append(f"{path.name}  its newest checkpoint is damaged: {error}")
    rows.sort(key=lambda row: row.saved_at or 0)
    say(*_table(rows))
    for fault in faults:
        say(*wrapped(fault, width(), "  "))
    others = len(inside) - len(folders)
    if others or not folders:
        say(f"{counted(len(folders), 'run')} in {folder}, and {counted(others, 'other folder')}")
    return plain_config({"runs": [dataclasses.asdict(row) for row in rows], "damaged": faults})


@dataclasses.dataclass(frozen=True)
class _Row:
    """A run, as `--json` prints it; None for what its folder does not tell."""

    name: str
    recipe: str | None
    state: str
    step: int
    steps: int | None
    epoch: int
    """Number of the epoch, from 1."""
    epochs: int | None
    evaluated_step: int | None
    metrics: Mapping[str, Any]
    """Results of the last evaluation."""
    saved_at: float | None
    """Seconds since 1970."""
    bytes: int
    used: float | None

    @property
    def cells(self) -> dict[str, str]:
        """The text of each column, by its head; empty if there is nothing to tell."""
        figures = metrics_text(self.metrics)
        if self.evaluated_step not in (None, self.step):
            figures = f"of step {self.evaluated_step}: {figures}"
        return {
            "recipe": self.recipe or "",
            "step": f"{self.step}/{self.steps}" if self.steps else str(self.step),
            "epoch": f"{self.epoch}/{self.epochs}" if self.epochs else str(self.epoch),
            "eval": figures,
            "saved": "" if self.saved_at is None else _age(time.time() - self.saved_at),
            "size": size_text(self.bytes),
            "used": "" if self.used is None else f"{self.used:.0%}",
            _STATE: self.state,
        }


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
    step, epoch, saved_at = 0, 0, None
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
    return _Row(
        name=path.name,
        recipe=str(config["recipe"]) if config.get("recipe") else None,
        state=state,
        step=step,
        steps=steps,
        epoch=epoch + 1,
        epochs=epochs,
        evaluated_step=None if scored is None else scored.step,
        metrics={} if scored is None else scored.metrics,
        saved_at=saved_at,
        bytes=_bytes(path),
        used=None if spent is None else spent.clock_fraction,
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

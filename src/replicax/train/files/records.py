"""The history of a run: records in memory, and files in the run folder.

config.json       the configuration and environment of the run
records.jsonl     one JSON object per line: kind "train", "eval", "noise", "skip" or "restore", ...
status.json       the newest record of each kind, replaced with each record
curves.png        updated during training, and at the end
noise_scale.json  the estimate from the "noise" records, if measured
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from replicax.errors import ConfigError
from replicax.text.blocks import Grid, html_of
from replicax.train.files.places import (
    Lines,
    exists,
    is_remote,
    make_folder,
    read_bytes,
    refuse_links,
    write_whole,
    writing,
)
from replicax.train.files.sealed import sealed

ISLANDS_KIND = "islands"
"""The kind of records that say which islands joined and left."""
CONFIG, RECORDS, DAMAGED = "config.json", "records.jsonl", "records-damaged.jsonl"
STATUS = "status.json"
_REPLACED = ("curves.png", "noise_scale.json", "best.json", "records.csv", STATUS, DAMAGED)
"""Files that a run writes anew at its start, its end, or meanwhile."""
_FOLDERS = ("lease", "checkpoints", "islands", "hlo", "profile")
HISTORY = "records_sha256"
"""Entry of a manifest's `extra`: the digest of the lines that the checkpoint counts."""
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Numbers = dict[str, float | None]


def as_floats(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in `values` as Python's; raises `TypeError` and `ValueError`."""
    return {str(name): float(value) for name, value in values.items()}


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("step", "epoch", "rows"), operator.index),
    **dict.fromkeys(("metrics", "figures"), as_floats),
    "seconds": float,
    "examples": lambda indices: tuple(map(operator.index, indices)),
}


@dataclasses.dataclass(frozen=True)
class Record:
    """Metrics of one or more steps, or of one evaluation."""

    kind: str
    """`"train"`, `"eval"`, `"noise"` (see `rx.hooks.NoiseMeter`), `"skip"`: the update of
    `step` was skipped (see `rx.Guard`), or `"restore"`: the run went back to
    `step` and continued from there."""
    step: int
    """Updates done when the metrics were taken; for train and noise records, including the update
    they belong to (noise is measured just before it)."""
    epoch: int
    """The epoch, counted from 0."""
    metrics: dict[str, float]
    rows: int
    """Real rows since the previous record of this kind; in a noise record, the rows measured."""
    seconds: float
    """Wall time of those rows; in the first train record, without the first step."""
    input_wait_fraction: float | None = None
    """Fraction of that time in which the loop waited for a batch."""
    examples: tuple[int, ...] | None = None
    """If the update was skipped: the indices in the source of the batch's real rows."""
    figures: dict[str, float] | None = None
    """Numbers that hooks add to a train record, such as a learning rate."""

    def __post_init__(self) -> None:
        """Convert the numbers of other libraries, such as a hook may have given."""
        for name, kind in _KINDS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, kind(value))

    def __repr__(self) -> str:
        known = {**self.metrics, **(self.figures or {})}
        parts = [f"{self.kind!r}, step={self.step}, epoch={self.epoch}"]
        parts += [f"{name} {value:.4g}" for name, value in known.items()]
        parts += [f"{self.rows_per_second:,.0f} rows/s"] if self.seconds > 0 else []
        return f"Record({', '.join(parts)})"

    def _repr_html_(self) -> str:
        known = {**self.metrics, **(self.figures or {})}
        rows = [(name, f"{value:.4g}") for name, value in known.items()]
        rows += [("rows/s", f"{self.rows_per_second:,.0f}")] if self.seconds > 0 else []
        title = f"{self.kind}, step {self.step:,}, epoch {self.epoch + 1}"
        return html_of([Grid([(title, ""), *rows])])

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else math.nan

    def to_json(self) -> str:
        """Format the record as one line; non-finite numbers become null, as JSON lacks them."""
        fields = {**dataclasses.asdict(self), "rows_per_second": self.rows_per_second}
        for name in ("examples", "figures"):
            if fields[name] is None:
                del fields[name]
        return json.dumps(_finite(fields))


@dataclasses.dataclass(frozen=True)
class History:
    """The first lines of `records.jsonl`, as far as they can be read."""

    records: list[Record]
    kept: bytes
    """The lines of these records."""
    reached: int
    """Last step of the records after them, which are dropped."""
    faults: list[str]
    """Descriptions of what is wrong with them."""
    damaged: bool = False
    """Whether lines that are there are not as they were written."""


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines, self._sha256 = Lines(self.records), hashlib.sha256()
        with writing(path):
            make_folder(path)
        refuse_links(path / name for name in _FOLDERS)

    @property
    def records(self) -> Path:
        return self.path / RECORDS

    @property
    def digest(self) -> str:
        """The SHA-256 of the lines of `records.jsonl`."""
        return self._sha256.hexdigest()

    @property
    def fault(self) -> str | None:
        """Why records are not written yet, unless that was returned before."""
        return self._lines.fault

    @property
    def unwritten(self) -> str | None:
        """Why records are not written yet."""
        return self._lines.unwritten

    def write_while(self, may_write: Callable[[], bool]) -> None:
        """Append records only while `may_write`: another process may take over the folder.

        It then replaces the file, so that a line on its way is lost with the old one.
        """
        self._lines.may_write = may_write

    def refuse_another(self, why: str) -> None:
        """Raise `ConfigError` if it has records of a run, which cannot resume because of `why`."""
        if exists(self.records):
            raise ConfigError(
                f"{self.path} contains the records of another run: {why}; choose another name, or "
                "remove it"
            )
        for name in _REPLACED:
            if exists(self.path / name):
                raise ConfigError(
                    f"{self.path / name} would be replaced, but is of no run that is here; choose "
                    "another name"
                )

    def write_config(self, config: dict[str, Any]) -> None:
        write_json(self.path / CONFIG, config)

    def append(self, record: Record) -> None:
        """Write a record now, or as soon as the file system allows it."""
        line = record.to_json()
        self._lines.append(line)
        self._sha256.update(f"{line}\n".encode())

    def tell(self, status: Mapping[str, Any]) -> None:
        """Replace `status.json`, on a disk; if that fails, the next record may succeed."""
        if not is_remote(self.path):
            with contextlib.suppress(OSError):
                write_whole(self.path / STATUS, f"{json.dumps(status)}\n".encode(), sync=False)

    def take_over(self, records: Sequence[Record], may_write: Callable[[], bool]) -> None:
        """Go on with the file of a process that is gone, from the `records` of this one.

        Both have the same, but for those of islands, which each notes at a step of its own; a
        damaged line, such as a full disk leaves, and those after it are written again. The file is
        replaced, so that a line on its way is lost with the old one.
        """
        with writing(self.records):
            texts = self._lines.contents().splitlines(keepends=True)
        good = itertools.takewhile(lambda record: record is not None, map(_record, texts))
        places = list(itertools.accumulate(r is not None and r.kind != ISLANDS_KIND for r in good))
        shared = [record.kind != ISLANDS_KIND for record in records]
        lines = sum(place <= sum(shared) for place in places)
        of_file = max(places[:lines], default=0)
        kept = self.keep(lines, anew=True).records
        self.write_while(may_write)
        known = {(each.kind, each.step, tuple(each.metrics.items())) for each in kept}
        for place, record in zip(itertools.accumulate(shared), records, strict=True):
            new = (record.kind, record.step, tuple(record.metrics.items())) not in known
            if place > of_file or (record.kind == ISLANDS_KIND and place == of_file and new):
                self.append(record)

    def keep(
        self, lines: int, digest: str | None = None, *, copied: bool = False, anew: bool = False
    ) -> History:
        """Keep the first `lines` of `records.jsonl` that can be read; later steps are repeated.

        With `anew` the file is replaced in any case. If `copied`, or if it is damaged, by `digest`
        too, it is copied to another one first.
        """
        with writing(self.records):
            data = self._lines.contents()
        history = _history(data, lines, digest)
        if history.damaged or (copied and data):
            with writing(self.path / DAMAGED):
                write_whole(self.path / DAMAGED, data)
        self._sha256 = hashlib.sha256(history.kept)
        if anew or data != history.kept:
            self._lines.replace(history.kept)
        return history

    def sync(self) -> None:
        self._lines.sync()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` to `path` as JSON with a checksum, converted by `plain_config`."""
    data = sealed(plain_config(value), indent=2)
    with writing(path):
        write_whole(path, data)


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """Convert `config` to JSON values: sets are sorted, other types text, NaN and infinity null."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(_finite(config), default=_as_json))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"this configuration cannot be written as JSON ({error}); use numbers, strings, lists, "
            "and dicts with string keys"
        ) from error
    return plain


def read_records(folder: Path, lines: int, digest: str | None = None) -> History:
    """Read the first `lines` records of the run in `folder`, whose SHA-256 was `digest`."""
    path = folder / RECORDS
    try:
        return _history(read_bytes(path) if lines and exists(path) else b"", lines, digest)
    except OSError as error:
        return History([], b"", 0, [f"{path} cannot be read ({error.strerror})"])


def _history(data: bytes, lines: int, digest: str | None) -> History:
    texts = data.splitlines(keepends=True)
    texts, dropped = texts[:lines], texts[lines:]
    changed = digest is not None and hashlib.sha256(b"".join(texts)).hexdigest() != digest
    parsed = [(text, _record(text)) for text in texts]
    good = [(text, record) for text, record in parsed if record is not None]
    faults = []
    if lost := lines - len(texts):
        faults.append(f"{lost:,} of {lines:,} records are missing")
    damaged = len(good) < len(parsed) or (changed and not lost)
    if len(good) < len(parsed):
        first = next(number for number, (_, record) in enumerate(parsed, 1) if record is None)
        faults.append(
            f"{len(parsed) - len(good):,} of {lines:,} records are damaged, first {first:,}"
        )
    elif damaged:
        faults.append(f"the first {lines:,} records are not those that were written")
    later = [record.step for record in map(_record, dropped) if record is not None]
    return History(
        records=[record for _, record in good],
        kept=b"".join(text for text, _ in good),
        reached=max(later, default=0),
        faults=faults,
        damaged=damaged,
    )


class _Line(msgspec.Struct):
    kind: str
    step: _Count
    epoch: _Count
    metrics: _Numbers
    rows: _Count
    seconds: float | None
    input_wait_fraction: float | None = None
    examples: tuple[int, ...] | None = None
    figures: _Numbers | None = None


_LINE = msgspec.json.Decoder(_Line)


def record_from_json(text: bytes | str) -> Record:
    """Parse a record that `Record.to_json` wrote; raises `ValueError`."""
    try:
        line = _LINE.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ValueError(str(error)) from error
    numbers = {"metrics": _nan(line.metrics), "figures": _nan(line.figures or {}) or None}
    seconds = math.nan if line.seconds is None else line.seconds
    return Record(**{**msgspec.structs.asdict(line), **numbers, "seconds": seconds})


def _record(text: bytes) -> Record | None:
    """Parse a record; None for a damaged one, such as a line cut off by a kill."""
    try:
        return record_from_json(text) if text.endswith(b"\n") else None
    except ValueError:
        return None


def _nan(values: _Numbers) -> dict[str, float]:
    return {name: math.nan if value is None else value for name, value in values.items()}


def _as_json(value: Any) -> Any:
    # A set of strings has another order in each process.
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

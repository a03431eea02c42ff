"""The history of a run: records in memory, and files in the run folder.

config.json       the configuration and environment of the run
records.jsonl     one JSON object per line: kind "train", "eval", "noise", "skip" or "restore", ...
curves.png        updated during training, and at the end
noise_scale.json  the estimate from the "noise" records, if measured
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from replicax.errors import ConfigError
from replicax.train.places import Lines, exists, make_folder, read_bytes, write_whole, writing

_NO_RECORD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors raised by reading a line that is not a record."""
CONFIG, RECORDS = "config.json", "records.jsonl"


@dataclasses.dataclass(frozen=True)
class Record:
    """Metrics of one or more steps, or of one evaluation."""

    kind: str
    """`"train"`, `"eval"`, `"noise"` (see `replicax.train.noise_scale`), `"skip"`: the update of
    `step` was skipped (see `replicax.train.dispatched`), or `"restore"`: the run went back to
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


class RunFolder:
    """The files of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = Lines(self.records)
        with writing(path):
            make_folder(path)

    @property
    def records(self) -> Path:
        return self.path / RECORDS

    def refuse_another(self, why: str) -> None:
        """Raise `ConfigError` if it has records of a run, which cannot resume because of `why`."""
        if exists(self.records):
            raise ConfigError(
                f"{self.path} contains the records of another run: {why}; choose another name, or "
                "remove it"
            )

    def write_config(self, config: dict[str, Any]) -> None:
        write_json(self.path / CONFIG, config)

    def append(self, record: Record) -> None:
        self._lines.append(record.to_json())

    def keep(self, lines: int) -> tuple[int, int]:
        """Keep the first `lines` of `records.jsonl`; the steps after them will be repeated."""
        self.sync()
        if not exists(self.records):
            return 0, 0
        found = read_bytes(self.records).splitlines(keepends=True)
        kept, dropped = found[:lines], found[lines:]
        with writing(self.records):
            write_whole(self.records, b"".join(kept))
        return len(kept), max(map(_step, dropped), default=0)

    def sync(self) -> None:
        self._lines.sync()


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write `value` to `path` as JSON, converted by `plain_config`."""
    text = json.dumps(plain_config(value), indent=2)
    with writing(path):
        write_whole(path, f"{text}\n".encode())


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """Convert `config` to JSON values: unknown types become text, non-finite numbers null."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(_finite(config), default=str))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"this configuration cannot be written as JSON ({error}); use numbers, strings, lists, "
            "and dicts with string keys"
        ) from error
    return plain


def read_records(folder: Path, lines: int) -> list[Record]:
    """Read the first `lines` records of the run in `folder`."""
    path = folder / RECORDS
    if not lines or not exists(path):  # lost, which a resumed run reports
        return []
    texts = read_bytes(path).splitlines()[:lines]
    records = []
    for number, text in enumerate(texts, 1):
        try:
            records.append(record_from_json(text))
        except _NO_RECORD as error:
            raise ConfigError(
                f"line {number} of {path} is not a record ({error}); restore the file, or start "
                "a new run"
            ) from error
    return records


def record_from_json(text: bytes | str) -> Record:
    """Parse a record that `Record.to_json` wrote."""
    fields = json.loads(text)
    waited, examples = fields.get("input_wait_fraction"), fields.get("examples")
    return Record(
        kind=str(fields["kind"]),
        step=int(fields["step"]),
        epoch=int(fields["epoch"]),
        metrics=_numbers(fields["metrics"]),
        rows=int(fields["rows"]),
        seconds=_number(fields["seconds"]),
        input_wait_fraction=None if waited is None else _number(waited),
        examples=None if examples is None else tuple(map(int, examples)),
        figures=_numbers(fields["figures"]) if fields.get("figures") else None,
    )


def _step(line: bytes) -> int:
    """Return the step of a record; 0 for a line cut off by a kill."""
    try:
        return record_from_json(line).step
    except _NO_RECORD:
        return 0


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: _number(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

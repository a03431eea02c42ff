"""A run's history: records in memory, and in the run folder as they come.

config.json       what was run, and on what
records.jsonl     one JSON object a line: kind "train", "eval", "noise", "skip" or "restore", ...
curves.png        drawn while it trains, and at the end
noise_scale.json  what the "noise" records come to, where it was measured
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from replicax.errors import ConfigError
from replicax.train.places import Lines, exists, make_folder, read_bytes, write_whole, writing

_NO_RECORD = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Errors of reading a line that is no record."""
CONFIG, RECORDS = "config.json", "records.jsonl"


@dataclasses.dataclass(frozen=True)
class Record:
    """Metrics of some steps, or of one evaluation."""

    kind: str
    """`"train"`, `"eval"`, `"noise"` (see `replicax.train.noise_scale`), `"skip"`: the update of
    `step` was skipped (see `replicax.train.dispatched`), or `"restore"`: the run went back to
    `step`, and on from there."""
    step: int
    """Updates done before the metrics were taken (train, and noise, which is measured before it:
    the update they belong to included)."""
    epoch: int
    """Counted from 0."""
    metrics: dict[str, float]
    rows: int
    """Real rows since the previous record of this kind; of a noise record, those measured."""
    seconds: float
    """Wall time of those rows; for the first train record, without the first step."""
    input_wait_fraction: float | None = None
    """Share of that time in which the loop waited for a batch."""
    examples: tuple[int, ...] | None = None
    """Where the update was skipped: indices, in the source, of the batch's real rows."""
    figures: dict[str, float] | None = None
    """Numbers that hooks add to a train record: a learning rate, say."""

    @property
    def rows_per_second(self) -> float:
        return self.rows / self.seconds if self.seconds > 0 else math.nan

    def to_json(self) -> str:
        """One line; a number that is not finite becomes null, as JSON has none."""
        fields = {**dataclasses.asdict(self), "rows_per_second": self.rows_per_second}
        for name in ("examples", "figures"):
            if fields[name] is None:
                del fields[name]
        return json.dumps(_finite(fields))


class RunFolder:
    """A run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines = Lines(self.records)
        with writing(path):
            make_folder(path)

    @property
    def records(self) -> Path:
        return self.path / RECORDS

    def refuse_another(self, why: str) -> None:
        """Raise `ConfigError` where it holds the records of a run; `why` that cannot go on."""
        if exists(self.records):
            raise ConfigError(
                f"{self.path} holds the records of another run: {why}; choose another name, or "
                "remove it"
            )

    def write_config(self, config: dict[str, Any]) -> None:
        write_json(self.path / CONFIG, config)

    def append(self, record: Record) -> None:
        self._lines.append(record.to_json())

    def keep(self, lines: int) -> tuple[int, int]:
        """Keep the first `lines` of `records.jsonl`: what came after them is to be done again."""
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
    """Write `value` as `plain_config` has it."""
    text = json.dumps(plain_config(value), indent=2)
    with writing(path):
        write_whole(path, f"{text}\n".encode())


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """`config` as JSON has it: what it does not know as text, what is not finite as null."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(_finite(config), default=str))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"this configuration cannot be written as JSON ({error}); use numbers, texts, lists, "
            "and dicts with texts as keys"
        ) from error
    return plain


def read_records(folder: Path, lines: int) -> list[Record]:
    """The first `lines` records of the run in `folder`."""
    path = folder / RECORDS
    if not lines or not exists(path):  # lost: who goes on says so
        return []
    texts = read_bytes(path).splitlines()[:lines]
    records = []
    for number, text in enumerate(texts, 1):
        try:
            records.append(record_from_json(text))
        except _NO_RECORD as error:
            raise ConfigError(
                f"line {number} of {path} is no record ({error}); restore the file, or start "
                "another run"
            ) from error
    return records


def record_from_json(text: bytes | str) -> Record:
    """The record that `Record.to_json` wrote as `text`."""
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
    """Return the step of a record; 0 where a kill has cut it off."""
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

"""A run's history: records in memory, and in the run folder as they come.

config.json       what was run, and on what
records.jsonl     one JSON object a line: kind "train", "eval", "noise" or "restore", step, ...
curves.png        drawn at the end
noise_scale.json  what the "noise" records come to, where it was measured
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import IO, Any

from replicax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Record:
    """Metrics of one step, or of one evaluation."""

    kind: str
    """`"train"`, `"eval"`, `"noise"` (see `replicax.train.noise_scale`), or `"restore"`: the run
    went back to `step`, and on from there."""
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

    @property
    def rows_per_second(self) -> float:
        """Real rows over wall time."""
        return self.rows / self.seconds if self.seconds > 0 else math.nan

    def to_json(self) -> str:
        """One line; a number that is not finite becomes null, as JSON has none."""
        fields = {**dataclasses.asdict(self), "rows_per_second": self.rows_per_second}
        return json.dumps(_finite(fields))


class RunFolder:
    """Writes a run's files.

    Raises:
        ConfigError: the folder holds another run, or cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: IO[str] | None = None
        if (path / "records.jsonl").exists():
            raise ConfigError(
                f"{path} holds the records of another run; a run has a folder of its own: choose "
                "another name, or remove it"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written ({error.strerror}); choose another"
            ) from error

    def write_config(self, config: dict[str, Any]) -> None:
        """Write `config.json`; what JSON does not know is written as text."""
        text = json.dumps(_finite(config), indent=2, default=str)
        (self.path / "config.json").write_text(text + "\n", encoding="utf-8")

    def append(self, record: Record) -> None:
        """Add a line to `records.jsonl`, at once visible to a reader."""
        if self._lines is None:  # a run that fails before it has a record leaves the name free
            self._lines = (self.path / "records.jsonl").open("a", encoding="utf-8")
        self._lines.write(record.to_json() + "\n")
        self._lines.flush()

    def rewind(self, step: int) -> None:
        """Take what was recorded after `step` out of `records.jsonl`: it is to be done again."""
        self.close()
        path = self.path / "records.jsonl"
        if not path.exists():
            return
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        beside = path.with_name("records.jsonl.new")  # a reader, or a crash, meets all or nothing
        beside.write_text("".join(kept), encoding="utf-8")
        beside.replace(path)

    def close(self) -> None:
        """Close `records.jsonl`."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""Hooks that watch a metric of the evaluations: `EarlyStopping` and `KeepBest`."""

import dataclasses
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from replicax.errors import ConfigError, choose
from replicax.train.checkpoints.store import CHECKPOINTS, Store
from replicax.train.hook import Hook, Running
from replicax.train.load import BEST
from replicax.train.places import in_folder, read_bytes, write_whole
from replicax.train.records import Record

_LESS_IS_BETTER = ("loss", "error", "perplexity", "bits_per_byte")
"""Names of metrics end in one of these."""

_MODES = {"min": "lowest", "max": "highest"}


@dataclasses.dataclass(frozen=True)
class Watched:
    """A metric, and its best value so far."""

    hook: str
    metric: str
    mode: str | None
    best: float | None = None
    step: int = 0
    since: int = 0

    def __post_init__(self) -> None:
        if self.mode is None:
            less = self.metric.endswith(_LESS_IS_BETTER)
            object.__setattr__(self, "mode", "min" if less else "max")
        choose(f"{self.hook} with mode", self.mode, _MODES)

    @property
    def title(self) -> str:
        """`the lowest loss`."""
        return f"the {_MODES[str(self.mode)]} {self.metric}"

    def after(self, record: Record, least: float = 0.0) -> "Watched":
        """Return this after the evaluation of `record`; gains below `least` are none."""
        choose(f"{self.hook} with metric", self.metric, record.metrics)
        value = record.metrics[self.metric]
        if not self._gains(value, least):
            return dataclasses.replace(self, since=self.since + 1)
        return dataclasses.replace(self, best=value, step=record.step, since=0)

    def save_state(self) -> dict[str, float | str | None]:
        fields = dataclasses.asdict(self)
        del fields["hook"]
        return fields

    def load_state(self, state: dict[str, float | str | None]) -> "Watched":
        """Return this as it was saved; as it is, where another metric was watched then."""
        loaded = dataclasses.replace(self, **state)  # type: ignore[arg-type]
        same = (loaded.metric, loaded.mode) == (self.metric, self.mode)
        return loaded if same else self

    def _gains(self, value: float, least: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > 0 and gain >= least


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise `ConfigError` where `value` is below `least`."""
    if not value >= least:
        raise ConfigError(f"{name}={value}; it is at least {least:g}: raise it")


class EarlyStopping(Hook):
    """Ends the run once an evaluated metric has not improved for a while.

    What it knows is in the checkpoints. A run that it has stopped and that is started again stops
    at once; with more patience it goes on.

    Example:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=100, eval_source=held_out,
        ...        hooks=[rx.EarlyStopping("accuracy", patience=5)])

    Args:
        metric: of the evaluations, as their records name it.
        patience: evaluations in a row without an improvement.
        mode: whether the best is the `min` or the `max`; by default `min` of a loss, an error, a
            perplexity and bits per byte, and else `max`.
        least: what counts as an improvement.

    Raises:
        ConfigError: a number below 1, or below 0, or another mode.
    """

    def __init__(
        self,
        metric: str = "loss",
        patience: int = 3,
        *,
        mode: str | None = None,
        least: float = 0.0,
    ) -> None:
        check_at_least("EarlyStopping with patience", patience, 1)
        check_at_least("EarlyStopping with least", least, 0)
        self._watched = self._nothing_seen = Watched("EarlyStopping", metric, mode)
        self._patience, self._least = patience, least

    @property
    def name(self) -> str:
        return f"EarlyStopping({self._watched.metric})"

    def start(self, run: Running) -> None:
        self._judge(run)

    def evaluation(self, run: Running, record: Record) -> None:
        self._watched = self._watched.after(record, self._least)
        self._judge(run)

    def end(self, run: Running) -> None:
        self._watched = self._nothing_seen  # of this run; there may be another

    def save_state(self) -> Any:
        return self._watched.save_state()

    def load_state(self, state: Any) -> None:
        self._watched = self._watched.load_state(state)

    def _judge(self, run: Running) -> None:
        watched = self._watched
        if watched.since >= self._patience:
            best = "was never finite"
            if watched.best is not None:
                best = f"is {watched.best:.6g}, of step {watched.step:,}"
            run.stop(f"{watched.title} {best}, {watched.since} evaluations ago")


class KeepBest(Hook):
    """Keeps the checkpoint of the best evaluation so far, and names it in `best.json`.

    `{"metric": "accuracy", "value": 0.91, "step": 120}` is written once the checkpoint of that step
    is in its place; until then the file names the best one before, which stays as long. So what it
    names is there, whenever the run is killed. `rx.load(run_dir, step="best")` reads it.

    Example:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=100, eval_source=held_out,
        ...        run_dir="runs/x", hooks=[rx.KeepBest("accuracy")])

    Args:
        metric: of the evaluations, as their records name it.
        mode: whether the best is the `min` or the `max`; by default `min` of a loss, an error, a
            perplexity and bits per byte, and else `max`.
        file: in the run's folder. Of several `KeepBest` each has its own.

    Raises:
        ConfigError: another mode; in a run, no folder.
    """

    def __init__(
        self, metric: str = "accuracy", *, mode: str | None = None, file: str = BEST
    ) -> None:
        self._watched = self._nothing_seen = Watched("KeepBest", metric, mode)
        self._file = file
        self._named: dict[str, Any] = {}
        """The contents of the file, as far as this process knows."""

    @property
    def name(self) -> str:
        return f"KeepBest({self._watched.metric})"

    @property
    def pinned(self) -> Collection[int]:
        steps = {self._named["step"]} if self._named else set()
        return steps if self._watched.best is None else {*steps, self._watched.step}

    def start(self, run: Running) -> None:
        if run.is_main:
            self._named = _read(in_folder(run.folder, self._file, self.name))
            self._name(run)

    def evaluation(self, run: Running, record: Record) -> None:
        self._watched = self._watched.after(record)
        if self._watched.since == 0 and self._watched.best is not None:
            run.save()

    def settle(self, run: Running, due: bool) -> None:
        self._name(run)

    def end(self, run: Running) -> None:
        self._name(run)
        if run.folder is not None and self._best not in ({}, self._named):
            run.say(
                f"ALARM  {self._watched.title} was that of step {self._watched.step:,}, whose "
                f"checkpoint could not be saved; {self._file} does not name it"
            )
        self._watched = self._nothing_seen  # of this run; there may be another

    def summary(self) -> list[str]:
        named = self._named
        if not named:
            return []
        return [f"best   {self._watched.title} {named['value']:.6g} at step {named['step']:,}"]

    def save_state(self) -> Any:
        return self._watched.save_state()

    def load_state(self, state: Any) -> None:
        self._watched = self._watched.load_state(state)

    @property
    def _best(self) -> dict[str, Any]:
        watched = self._watched
        if watched.best is None:
            return {}
        return {"metric": watched.metric, "value": watched.best, "step": watched.step}

    def _name(self, run: Running) -> None:
        """Write the file, where there is a better checkpoint in its place than it names."""
        best = self._best
        if run.folder is None or best in ({}, self._named):
            return
        if best["step"] not in dict(Store(run.folder / CHECKPOINTS, 1, None).paths()):
            return
        path = run.folder / self._file
        if _read(path) != self._named:
            raise ConfigError(
                f"{path} was written by another KeepBest than {self.name}; each needs a file of "
                f"its own: KeepBest({best['metric']!r}, file='best-{best['metric']}.json')"
            )
        write_whole(path, f"{json.dumps(best)}\n".encode())
        self._named = best


def _read(path: Path) -> dict[str, Any]:
    """The contents of the file; empty where it is not there, or something else."""
    try:
        found = json.loads(read_bytes(path))
        return {name: found[name] for name in ("metric", "value", "step")}
    except (OSError, ValueError, KeyError, TypeError):
        return {}

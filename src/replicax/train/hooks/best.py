"""Hooks that track an evaluation metric: `EarlyStopping` and `KeepBest`."""

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from replicax.errors import ConfigError, choose
from replicax.text.arguments import Count, NotNegative, typed
from replicax.train.checkpoints.store import CHECKPOINTS, Store
from replicax.train.files.places import in_folder, read_bytes, write_whole
from replicax.train.files.records import Record
from replicax.train.files.sealed import sealed, unsealed
from replicax.train.folder.load import BEST, Best
from replicax.train.hooks.hook import Hook, Running

Direction = Literal["min", "max"]
"""Which values of a metric are better."""
_MODES = {"min": "lowest", "max": "highest"}


class _Watching(Hook):
    """A hook that tracks the best value of an evaluation metric so far."""

    _best: float | None = None
    _step = _since = 0  # step of the best value, and number of evaluations since
    _data: Any = None  # digest of the rows that the best value was measured on, if known

    def __init__(self, metric: str, mode: str | None) -> None:
        if mode is not None:
            choose(f"{type(self).__name__} with mode", mode, _MODES)
        self._metric, self._mode = metric, mode or direction(metric)

    @property
    def name(self) -> str:
        return f"{type(self).__name__}({self._metric})"

    def before_run(self, run: Running) -> None:
        known = run.evaluation_metrics()
        if known is not None:
            if not known:
                raise ConfigError(
                    f"{self.name} in a run without evaluations, which are what it tracks: pass an "
                    "eval_source, or remove it"
                )
            choose(f"{type(self).__name__} with metric", self._metric, dict.fromkeys(known))
        if self._mode is None:
            kind = type(self).__name__
            raise ConfigError(
                f"{kind} with metric {self._metric!r}, whose name does not tell whether lower or "
                f'higher is better: write {kind}({self._metric!r}, mode="min") or mode="max" '
                f"({self._metric}:min or {self._metric}:max on the command line)"
            )

    def start(self, run: Running) -> None:
        then, sets = self._data, run.config.get("data", {}).get("evaluation", {})
        self._data = {
            name: rows
            for name, rows in sets.items()
            if name == "rows" or self._metric.startswith(f"{name}/")
        }
        if self._best is not None and then and self._data and then != self._data:
            run.say(
                f"change {self._title} {self._best:.6g} at step {self._step:,} was measured on "
                "other evaluation data: it is compared no longer"
            )
            self._best, self._step, self._since = None, 0, 0

    def end(self, run: Running) -> None:
        self._best, self._step, self._since = None, 0, 0  # there may be another run

    def save_state(self) -> Any:
        about = {"metric": self._metric, "mode": self._mode, "data": self._data}
        return {**about, "best": self._best, "step": self._step, "since": self._since}

    def load_state(self, state: Any) -> None:
        if (state["metric"], state["mode"]) == (self._metric, self._mode):
            self._best, self._step, self._since = state["best"], state["step"], state["since"]
            self._data = state.get("data")

    @property
    def _title(self) -> str:
        """A description such as `the lowest loss`."""
        assert self._mode is not None
        return f"the {_MODES[self._mode]} {self._metric}"

    def _gains(self, record: Record, least: float = 0.0) -> bool:
        """Return whether the evaluation of `record` is the best so far, by at least `least`."""
        choose(f"{type(self).__name__} with metric", self._metric, record.metrics)
        value, gain = record.metrics[self._metric], math.inf
        if self._best is not None:
            gain = self._best - value if self._mode == "min" else value - self._best
        if not (math.isfinite(value) and gain > 0 and gain >= least):
            self._since += 1
            return False
        self._best, self._step, self._since = value, record.step, 0
        return True


class EarlyStopping(_Watching):
    """Stops the run when an evaluation metric has stopped improving.

    Its state is saved in checkpoints. A run that it stopped stops again immediately when resumed,
    and continues if `patience` is increased.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=100, eval_source=held_out,
        ...        hooks=[rx.hooks.EarlyStopping("accuracy", patience=5)])

    Args:
        metric: name of the metric in the evaluation records.
        patience: number of consecutive evaluations without improvement before stopping.
        mode: `min` or `max`; by default by the metric's name, if it is one that is known: `min` for
            a loss, `max` for an accuracy (docs/hooks.md has the list).
        min_delta: minimum change that counts as an improvement.

    Raises:
        ConfigError: `patience` below 1, `min_delta` below 0, or an unknown mode; in a run, a metric
            of another name without a `mode`.
    """

    @typed
    def __init__(
        self,
        metric: str = "loss",
        patience: Count = 3,
        *,
        mode: Direction | None = None,
        min_delta: NotNegative = 0.0,
    ) -> None:
        super().__init__(metric, mode)
        self._patience, self._min_delta = patience, min_delta

    def start(self, run: Running) -> None:
        super().start(run)
        self._stop_if_due(run)

    def _stop_if_due(self, run: Running) -> None:
        if self._since >= self._patience:
            best = "was never finite"
            if self._best is not None:
                best = f"is {self._best:.6g}, at step {self._step:,}"
            run.stop(f"{self._title} {best}, {self._since} evaluations ago")

    def evaluation(self, run: Running, record: Record) -> None:
        self._gains(record, self._min_delta)
        self._stop_if_due(run)


class KeepBest(_Watching):
    """Keeps the checkpoint of the best evaluation so far, and names it in `best.json`.

    `{"metric": "accuracy", "value": 0.91, "step": 120}` is written once the checkpoint of that step
    is committed; until then the file names the previous best, which is kept. The named checkpoint
    therefore always exists, even if the run is killed. `rx.load(run_dir, step="best")` loads it.

    Examples:
        >>> rx.fit(dp, state, source, batch_size=32, epochs=100, eval_source=held_out,
        ...        run_dir="runs/x", hooks=[rx.hooks.KeepBest("accuracy")])

    Args:
        metric: name of the metric in the evaluation records.
        mode: `min` or `max`; by default by the metric's name, if it is one that is known: `min` for
            a loss, `max` for an accuracy (docs/hooks.md has the list).
        file: name in the run's folder, unique among several `KeepBest`.

    Raises:
        ConfigError: an unknown mode; in a run, no folder, or a metric of another name without a
            `mode`.
    """

    @typed
    def __init__(
        self, metric: str = "loss", *, mode: Direction | None = None, file: str = BEST
    ) -> None:
        super().__init__(metric, mode)
        if Path(file).name != file:
            raise ConfigError(
                f"KeepBest with file={file!r}; it is a name in the run's folder: leave out the path"
            )
        self._file = file
        self._named: dict[str, Any] = {}  # the file's contents, as known to this process

    @property
    def pinned(self) -> Collection[int]:
        return {best["step"] for best in (self._named, self._found) if best}

    def before_run(self, run: Running) -> None:
        super().before_run(run)
        if not run.resumable:
            raise ConfigError(
                f"{self.name} in a run that saves no checkpoint to keep: pass a run_dir, and a "
                "Saving with steps or minutes"
            )

    def start(self, run: Running) -> None:
        super().start(run)
        if run.is_main:
            self._named = _read(in_folder(run.folder, self._file, self.name))
            self._name(run)

    def take_over(self, run: Running) -> None:
        self.start(run)

    def evaluation(self, run: Running, record: Record) -> None:
        if self._gains(record):
            run.save()

    def settle(self, run: Running, due: bool) -> None:
        self._name(run)

    def end(self, run: Running) -> None:
        self._name(run)
        if run.folder is not None and self._found not in ({}, self._named):
            run.alarm(
                f"{self._title} was at step {self._step:,}, but its checkpoint could not be "
                f"saved; {self._file} does not name it"
            )
        super().end(run)

    def summary(self) -> list[str]:
        named = self._named
        if not named:
            return []
        return [f"best   {self._title} {named['value']:.6g} at step {named['step']:,}"]

    @property
    def _found(self) -> dict[str, Any]:
        if self._best is None:
            return {}
        best = {"metric": self._metric, "value": self._best, "step": self._step}
        return best | ({"evaluation": self._data} if self._data else {})

    def _name(self, run: Running) -> None:
        """Update the file if a better checkpoint than the one it names has been committed."""
        best = self._found
        if run.folder is None or best in ({}, self._named):
            return
        if best["step"] not in dict(Store(run.folder / CHECKPOINTS, 1, None).paths()):
            return
        path = run.folder / self._file
        if _read(path) != self._named:
            raise ConfigError(
                f"{path} was written by a KeepBest other than {self.name}; each needs a separate "
                f"file: KeepBest({best['metric']!r}, file='best-{best['metric']}.json')"
            )
        write_whole(path, sealed(best))
        self._named = best


def _read(path: Path) -> dict[str, Any]:
    """Return the contents of the file; empty if it is missing or invalid."""
    try:
        return dict(unsealed(read_bytes(path), Best))
    except (OSError, ValueError):
        return {}


LOWER_IS_BETTER = ("loss", "error", "perplexity", "bits_per_byte")
HIGHER_IS_BETTER = (
    *("accuracy", "precision", "average_precision", "recall", "f1", "auc", "auroc", "iou", "dice"),
    *("bleu", "exact_match"),
)
_NEGATED = re.compile(r"(^|[/_. -])(neg|negative|minus|inverse)[_. -]")


def direction(metric: str) -> str | None:
    """Return `min` or `max` for a metric whose name is known, else None.

    The name may have a prefix, as in `dev/loss` or `top5_accuracy`, and a rank, as in `recall@10`.
    A negated one, such as `neg_mse`, is not known.
    """
    name = re.sub(r"@\d+$", "", metric.lower())
    if _NEGATED.search(name):
        return None
    for mode, words in (("min", LOWER_IS_BETTER), ("max", HIGHER_IS_BETTER)):
        if re.search(rf"(^|[/_. -])({'|'.join(words)})$", name):
            return mode
    return None

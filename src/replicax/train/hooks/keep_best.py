"""`KeepBest`: the checkpoint of the best evaluation stays, and `best.json` names it."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from replicax.errors import ConfigError
from replicax.train.checkpoints.store import Store
from replicax.train.hook import Hook, Running
from replicax.train.hooks.folder import in_folder
from replicax.train.hooks.watched import Watched
from replicax.train.places import read_bytes, write_whole
from replicax.train.records import Record
from replicax.train.storage import CHECKPOINTS

FILE = "best.json"


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
        self, metric: str = "accuracy", *, mode: str | None = None, file: str = FILE
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
            self._named = _read(in_folder(run, self._file, self.name))
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

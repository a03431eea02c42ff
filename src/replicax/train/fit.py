"""`fit`: the whole loop around the step."""

import contextlib
import dataclasses
import itertools
import math
import time
from pathlib import Path
from typing import Any

import jax

from replicax.cluster.agreement import agree
from replicax.cluster.pulse import PULSE
from replicax.data.feed import Feed
from replicax.data.source import Source, as_source, can_shuffle
from replicax.errors import ConfigError, DivergedError, MissingDependencyError
from replicax.parallel.step import DataParallel
from replicax.parallel.update import TrainState
from replicax.train.curves import draw_curves
from replicax.train.interrupt import Interrupt
from replicax.train.meter import Meter
from replicax.train.progress import Progress, open_progress
from replicax.train.records import Record, RunFolder
from replicax.train.report import derived, describe, epoch_line, summary
from replicax.train.stopping import Stopping


@dataclasses.dataclass(frozen=True)
class Fit:
    """How a run ended."""

    state: TrainState
    records: list[Record]
    steps: int
    """Updates done in this call."""
    rows: int
    """Real rows trained on."""
    seconds: float
    """Wall time, compilation and evaluation included."""
    interrupted: bool
    """Whether Ctrl-C ended it early."""

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last evaluation, or of the last recorded step where there was none."""
        kinds = [r for r in self.records if r.kind == "eval"] or self.records
        return kinds[-1].metrics if kinds else {}


def fit(
    dp: DataParallel,
    state: TrainState,
    source: Any,
    *,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    eval_source: Any = None,
    eval_batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    log_every: int = 50,
    run_dir: str | Path | None = None,
    config: dict[str, Any] | None = None,
    title: str = "run",
    progress: bool = True,
) -> Fit:
    """Train for some epochs or steps, evaluating after each epoch.

    In a job of several processes all call it alike, and process 0 prints and records.

    Args:
        dp: what to step with.
        state: from `dp.init`; consumed where `dp` donates.
        source: as for `dp.feed`.
        batch_size: rows of a global batch.
        epochs: passes over the source. Give this or `steps`.
        steps: updates.
        eval_source: evaluated whole after every epoch, and after the last step.
        eval_batch_size: `batch_size` by default.
        shuffle: whether each epoch has an order of its own; by default wherever the source can.
        seed: of that order.
        log_every: steps between two train records.
        run_dir: a new folder for `config.json`, `records.jsonl` and `curves.png`; None for none.
        config: what `config.json` is to hold beside what is derived here.
        title: of the curves.
        progress: whether to print what is derived, a live line, and a closing summary.

    Raises:
        ConfigError: arguments that cannot work.
        AgreementError: processes that were given different ones.
        LossError: see `DataParallel.step`.
        DivergedError: the loss is no longer finite.
    """
    _check_length(epochs, steps, log_every)
    if eval_batch_size is None:
        eval_batch_size = batch_size
    if shuffle is None:
        shuffle = can_shuffle(source)
    opened = as_source(source, batch_size, shuffle=shuffle, seed=seed)
    wanted = {"epochs": epochs, "steps": steps, "batch_size": batch_size, "log_every": log_every}
    agree("the run", {**wanted, "evaluation": eval_source is not None, **(config or {})})
    speaks = jax.process_index() == 0
    first = dp.feed(opened)
    total = steps if steps is not None else _total_steps(first, epochs)
    loop = _Loop(
        dp=dp,
        source=opened,
        eval_feed=None if eval_source is None else dp.feed(eval_source, eval_batch_size),
        epochs=epochs,
        total=total,
        meter=Meter(log_every),
        folder=RunFolder(Path(run_dir)) if run_dir is not None and speaks else None,
        display=open_progress(progress and speaks, total),
    )
    with contextlib.closing(loop):
        for line in describe(dp, state, first):
            loop.display.line(line)
        if loop.folder:
            loop.folder.write_config({**(config or {}), **derived(dp, first)})
        try:
            result = loop.run(state)
        finally:
            if loop.folder and loop.records:
                _draw(loop.records, loop.folder.path, title, loop.display)
        for line in summary(result, total):
            loop.display.line(line)
    return result


@dataclasses.dataclass
class _Loop:
    """One call of `fit` on its way."""

    dp: DataParallel
    source: Source
    eval_feed: Feed | None
    epochs: int | None
    total: int | None
    meter: Meter
    folder: RunFolder | None
    display: Progress
    records: list[Record] = dataclasses.field(default_factory=list)
    step: int = 0
    rows: int = 0
    evaluated_at: int = 0

    def run(self, state: TrainState) -> Fit:
        """All epochs, or as many steps as there are to be, or until Ctrl-C."""
        started = time.perf_counter()
        with Interrupt() as interrupt:
            stopping = Stopping(interrupt)
            for epoch in itertools.count() if self.epochs is None else range(self.epochs):
                state = self._train(state, epoch, stopping)
                if self.step != self.evaluated_at and not stopping.wanted:
                    self._evaluate(state, epoch)
                if stopping.wanted or self._all_steps_done():
                    break
        PULSE.rest()
        seconds = time.perf_counter() - started
        return Fit(state, self.records, self.step, self.rows, seconds, stopping.wanted)

    def close(self) -> None:
        """Give the terminal and the files back."""
        self.display.close()
        if self.folder:
            self.folder.close()

    def _train(self, state: TrainState, epoch: int, stopping: Stopping) -> TrainState:
        """One epoch, or what is left of the steps."""
        feed = self.dp.feed(self.source, epoch=epoch)
        waited = 0.0
        with contextlib.closing(iter(feed)) as batches:
            for batch in batches:
                self.meter.add_wait(feed.wait_seconds - waited)
                waited = feed.wait_seconds
                if not self.step:
                    self.display.status("compiling the step")
                state, metrics = self.dp.step(state, batch)
                self.step += 1
                self.rows += batch.rows or 0
                self.display.step(self.step)
                self._keep(self.meter.add(self.step, epoch, batch.rows or 0, metrics))
                if self.step == 1 and self.eval_feed is not None:
                    self.dp.check(self.eval_feed)
                if stopping.vote(self.step) or self._all_steps_done():
                    break
        self._keep(self.meter.flush())
        return state

    def _evaluate(self, state: TrainState, epoch: int) -> None:
        """Evaluate where there is something to evaluate on, and say how the epoch went."""
        self.evaluated_at = self.step
        started = time.perf_counter()
        record = None
        if self.eval_feed is not None:
            metrics = self.dp.evaluate(state, self.eval_feed)
            rows = int(metrics.pop("rows"))
            seconds = time.perf_counter() - started
            record = Record("eval", self.step, epoch, metrics, rows, seconds)
            self._keep([record])
        trained = [r for r in self.records if r.kind == "train" and r.epoch == epoch]
        self.display.line(epoch_line(epoch, self.epochs, self.step, trained, record))
        self.meter.leave_out(time.perf_counter() - started)

    def _keep(self, records: list[Record]) -> None:
        for record in records:
            self.records.append(record)
            if self.folder:
                self.folder.append(record)
            if record.kind == "train":
                self.display.record(record)
            if not math.isfinite(record.metrics["loss"]):
                raise DivergedError(
                    f"the {record.kind} loss is {record.metrics['loss']} at step {record.step}; "
                    "training cannot go on from it: lower the learning rate, or clip the gradient"
                )

    def _all_steps_done(self) -> bool:
        return self.total is not None and self.step >= self.total


def _check_length(epochs: int | None, steps: int | None, log_every: int) -> None:
    if (epochs is None) == (steps is None):
        raise ConfigError(
            f"epochs={epochs} and steps={steps}; a run has one length: give one of them"
        )
    for name, value in (("epochs", epochs), ("steps", steps), ("log_every", log_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value}; it is at least 1: raise it")


def _total_steps(feed: Feed, epochs: int | None) -> int | None:
    return None if epochs is None or feed.padding is None else epochs * len(feed)


def _draw(records: list[Record], folder: Path, title: str, display: Progress) -> None:
    try:
        draw_curves(records, folder / "curves.png", title)
    except MissingDependencyError as error:
        display.line(f"no curves.png: {error}")

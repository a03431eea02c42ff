"""`fit`: the whole loop around the step."""

import contextlib
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import jax

from replicax.cluster.agreement import agree
from replicax.cluster.pulse import PULSE
from replicax.data.digest import sha256
from replicax.data.feed import Feed
from replicax.data.source import Source, as_source, can_shuffle
from replicax.errors import ConfigError, DivergedError, MissingDependencyError
from replicax.parallel.guarded import guarded
from replicax.parallel.step import DataParallel
from replicax.parallel.update import NOT_FINITE, TrainState
from replicax.train.audit import Audit, Place, Restored
from replicax.train.curves import COLOURS, draw_curves
from replicax.train.interrupt import Interrupt
from replicax.train.meter import Meter
from replicax.train.noise_scale import NoiseMeter, NoiseScale, noise_record, noise_scale
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
    clean_audits: int | None = None
    """Audits that found all replicas equal; None where none was asked for."""
    restores: int = 0
    """Times that it went back to the state of a clean audit."""
    noise_scale: NoiseScale | None = None
    """The gradient noise scale; None where it was not measured."""

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last evaluation, or of the last recorded step where there was none."""
        steps = [r for r in self.records if r.kind in ("train", "eval")]
        kinds = [r for r in steps if r.kind == "eval"] or steps
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
    audit_every: int | None = None,
    on_divergence: str = "stop",
    measure_noise_every: int | None = None,
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
        audit_every: steps between two audits, which compare the bits of all that the devices hold
            copies of; None for none. See `replicax.train.audit`.
        on_divergence: what an audit does that finds a device with other bits: `stop`, or `restore`
            the state of the last clean audit and go on from there.
        measure_noise_every: steps between two samples of the gradient noise, each of which costs
            about a gradient; None for none. See `replicax.train.noise_scale`.
        run_dir: a new folder for `config.json`, `records.jsonl`, `curves.png`, and where it is
            measured `noise_scale.json`; None for none.
        config: what `config.json` is to hold beside what is derived here.
        title: of the curves.
        progress: whether to print what is derived, a live line, and a closing summary.

    Raises:
        ConfigError: arguments that cannot work.
        AgreementError: processes that were given different ones.
        LossError: see `DataParallel.step`.
        DivergedError: the loss is no longer finite.
        ReplicasDifferError: the replicas are no longer equal.
    """
    _check_length(epochs, steps, log_every)
    if eval_batch_size is None:
        eval_batch_size = batch_size
    if shuffle is None:
        shuffle = can_shuffle(source)
    opened = as_source(source, batch_size, shuffle=shuffle, seed=seed)
    wanted: dict[str, Any] = {"epochs": epochs, "steps": steps, "batch_size": batch_size}
    wanted |= {"log_every": log_every, "audit_every": audit_every, "on_divergence": on_divergence}
    wanted |= {"measure_noise_every": measure_noise_every}
    agree("the run", {**wanted, "evaluation": eval_source is not None, **(config or {})})
    speaks = jax.process_index() == 0
    first = dp.feed(opened)
    total = steps if steps is not None else _total_steps(first, epochs)
    audit = None
    if audit_every is not None:
        dp = guarded(dp, state)
        audit = Audit(dp, state, opened, audit_every, on_divergence)
        audit.begin(state, Place(0, 0, 0))
    noise = None
    if measure_noise_every is not None:
        noise = NoiseMeter(dp, state, measure_noise_every, opened.batch_size)
    loop = _Loop(
        dp=dp,
        source=opened,
        eval_feed=None if eval_source is None else dp.feed(eval_source, eval_batch_size),
        epochs=epochs,
        total=total,
        meter=Meter(log_every),
        audit=audit,
        noise=noise,
        folder=RunFolder(Path(run_dir)) if run_dir is not None and speaks else None,
        display=open_progress(progress and speaks, total),
    )
    with contextlib.closing(loop):
        for line in [*describe(dp, state, first), *(audit.describe() if audit else ())]:
            loop.display.line(line)
        if loop.folder:
            loop.folder.write_config({**(config or {}), **derived(dp, first)})
        try:
            result = loop.run(state)
        finally:
            if loop.folder and loop.records:
                _draw(loop.records, loop.folder.path, title, loop.display)
        if loop.folder and result.noise_scale is not None:
            result.noise_scale.save(loop.folder.path)
        for line in summary(result, total):
            loop.display.line(line)
        if dp.mode == "exact":
            loop.display.line(f"bits   sha256 of the weights {sha256(result.state.params)[:16]}")
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
    audit: Audit | None
    noise: NoiseMeter | None
    folder: RunFolder | None
    display: Progress
    records: list[Record] = dataclasses.field(default_factory=list)
    step: int = 0
    rows: int = 0
    evaluated_at: int = 0
    rows_when_good: tuple[int, int] = (0, 0)
    """Rows trained on, and those in no record, when the state was found good that is kept."""

    def run(self, state: TrainState) -> Fit:
        """All epochs, or as many steps as there are to be, or until Ctrl-C."""
        started = time.perf_counter()
        with Interrupt() as interrupt:
            stopping = Stopping(interrupt)
            epoch, first = 0, 0
            while self.epochs is None or epoch < self.epochs:
                state, back = self._train(state, epoch, first, stopping)
                if back is not None:
                    epoch, first = back.epoch, back.batch
                    continue
                if self.step != self.evaluated_at and not stopping.wanted:
                    self._evaluate(state, epoch)
                if stopping.wanted or self._all_steps_done():
                    break
                epoch, first = epoch + 1, 0
        PULSE.rest()
        seconds = time.perf_counter() - started
        result = Fit(state, self.records, self.step, self.rows, seconds, stopping.wanted)
        if self.noise is not None:
            result = dataclasses.replace(result, noise_scale=noise_scale(self.records))
        if self.audit is None:
            return result
        clean, restores = self.audit.clean, self.audit.restores
        return dataclasses.replace(result, clean_audits=clean, restores=restores)

    def close(self) -> None:
        """Give the terminal and the files back."""
        self.display.close()
        if self.folder:
            self.folder.close()

    def _train(
        self, state: TrainState, epoch: int, first: int, stopping: Stopping
    ) -> tuple[TrainState, Place | None]:
        """One epoch from its batch `first` on, or what is left of the steps.

        Returns:
            The state, and where to go on from, where that is not after it.
        """
        feed = self.dp.feed(self.source, epoch=epoch, first=first)
        place, waited = Place(self.step, epoch, first), 0.0
        with contextlib.closing(iter(feed)) as batches:
            for batch in batches:
                self.meter.add_wait(feed.wait_seconds - waited)
                waited = feed.wait_seconds
                if not self.step:
                    self.display.status("compiling the step")
                    if self.noise is not None:
                        self.noise.prepare(state, batch)
                sample = None if self.noise is None else self.noise.take(place.step, state, batch)
                state, metrics = self.dp.step(state, batch)
                self.step += 1
                self.rows += batch.rows or 0
                self.display.step(self.step)
                not_finite = metrics.pop(NOT_FINITE, None)
                records = self.meter.add(self.step, epoch, batch.rows or 0, metrics)
                if sample is not None:
                    records.append(noise_record(sample, self.step, epoch))
                place = Place(self.step, epoch, place.batch + 1)
                if not_finite is not None and self.audit is not None:
                    restored = self.audit.after(state, not_finite, place)
                    if restored is not None:
                        return self._go_back(restored)
                self._keep(records)
                self._note_good(place)
                if self.step == 1 and self.eval_feed is not None:
                    self.dp.check(self.eval_feed)
                if stopping.vote(self.step) or self._all_steps_done():
                    break
        if self.audit is not None:
            last = stopping.wanted or self._all_steps_done() or epoch + 1 == self.epochs
            look = last or self.eval_feed is not None
            restored = self.audit.settle(state, place, audit=look)
            if restored is not None:
                return self._go_back(restored)
        self._keep(self.meter.flush())
        self._note_good(place)
        return state, None

    def _note_good(self, place: Place) -> None:
        """Where this is a place to come back to, note what is to be counted on from then."""
        if self.audit is not None and self.audit.keeps and self.audit.good == place:
            records, unrecorded = self.meter.settle()
            self._keep(records)
            self.rows_when_good = self.rows, unrecorded

    def _go_back(self, restored: Restored) -> tuple[TrainState, Place]:
        """Go on from an earlier step: what came after it has not been."""
        lost, place = self.step - restored.place.step, restored.place
        self.display.line(f"restored step {place.step:,}, {lost} steps back: {restored.text}")
        self.step, self.evaluated_at = place.step, min(self.evaluated_at, place.step)
        self.rows, unrecorded = self.rows_when_good
        self.meter.rewind(place.step, unrecorded)
        self.records[:] = [record for record in self.records if record.step <= place.step]
        if self.folder:
            self.folder.rewind(place.step)
        told = {"steps_lost": float(lost)}
        told |= {f"device_{device}": 1.0 for device in restored.devices}
        self._keep([Record("restore", place.step, place.epoch, told, 0, 0.0)])
        return restored.state, place

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
            if not math.isfinite(record.metrics.get("loss", 0.0)):
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
        drawn = [record for record in records if record.kind in COLOURS]
        draw_curves(drawn, folder / "curves.png", title)
    except MissingDependencyError as error:
        display.line(f"no curves.png: {error}")

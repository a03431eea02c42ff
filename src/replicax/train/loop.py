"""The loop around the step: epochs, evaluations, records, checkpoints."""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from replicax.core.batch import Batch
from replicax.core.data_parallel import DataParallel
from replicax.core.feed import Feed
from replicax.core.in_flight import STEPS_IN_FLIGHT
from replicax.core.sources import Source
from replicax.core.update import TrainState
from replicax.errors import DivergedError
from replicax.train.audit import Audit, Restored
from replicax.train.bad_steps import BadSteps
from replicax.train.checkpoints.manifest import Position
from replicax.train.dispatched import Place, dispatched
from replicax.train.goodput import Ledger
from replicax.train.interrupt import Interrupt
from replicax.train.meter import Meter
from replicax.train.noise_scale import NoiseMeter, noise_record
from replicax.train.program_fingerprint import program_fingerprint
from replicax.train.progress import Progress
from replicax.train.records import Record
from replicax.train.report import epoch_line, skip_line
from replicax.train.run import Run, parts_of_processes
from replicax.train.stopping import Stopping


@dataclasses.dataclass
class Loop:
    """A run on its way, in this start of it."""

    dp: DataParallel
    source: Source
    eval_feed: Feed | None
    eval_ema: bool
    epochs: int | None
    total: int | None
    meter: Meter
    bad_steps: BadSteps
    audit: Audit | None
    noise: NoiseMeter | None
    run: Run | None
    ledger: Ledger
    display: Progress
    interrupt: Interrupt
    stopping: Stopping
    records: list[Record] = dataclasses.field(default_factory=list)
    place: Place = dataclasses.field(default_factory=lambda: Place(0, 0, 0))
    rows: int = 0
    """Trained on in the whole run."""
    evaluated_at: int = 0
    good: tuple[Position, float] | None = None
    """Where the state was good that an audit keeps, and the seconds of its unrecorded rows."""
    _good_at: float = 0.0
    _begun: bool = False
    """Whether a step was done in this start."""

    @property
    def step(self) -> int:
        """Updates done in the whole run."""
        return self.place.step

    def go(self, state: TrainState) -> TrainState:
        """All epochs, or as many steps as there are to be, or until it is to stop."""
        self.dp.job.in_flight.forget()  # notes of a run that ended with an error
        while self.epochs is None or self.place.epoch < self.epochs:
            state, back = self._train(state)
            if back:
                continue
            if self.step != self.evaluated_at and not self.stopping.wanted:
                self._evaluate(state)
            if self.stopping.wanted or self._all_steps_done():
                break
            if self.place.epoch + 1 == self.epochs:
                break
            self.place = Place(self.step, self.place.epoch + 1, 0)
        if self.run is not None and self._resumable:
            self.run.finish(state, self.position(), self.extra())
        self.interrupt.let_go()
        return state

    def position(self) -> Position:
        """Where the run stands, all records being written that are due."""
        unrecorded, _ = self.meter.unrecorded
        rows = self.place.batch * self.source.batch_size
        return Position(
            step=self.step,
            epoch=self.place.epoch,
            rows=rows if self.source.rows is None else min(rows, self.source.rows),
            evaluated_step=self.evaluated_at,
            rows_trained=self.rows,
            rows_unrecorded=unrecorded,
            records=len(self.records),
            bad_steps=self.bad_steps.in_a_row,
        )

    def extra(self) -> dict[str, Any]:
        """What a checkpoint holds beside it: see `stand_at` and `first_batch`."""
        _, seconds = self.meter.unrecorded
        told = {"batch": self.place.batch, "seconds_unrecorded": round(seconds, 6)}
        return told | parts_of_processes(self.source)

    def stand_at(self, position: Position, batch: int, seconds_unrecorded: float) -> None:
        """Go on from `position`: what came after it has not been.

        Args:
            position: with `records` of those that there are.
            batch: of the epoch, counted from 0, that is next.
            seconds_unrecorded: that the rows without a record took.
        """
        self.place = Place(position.step, position.epoch, batch)
        self.rows, self.evaluated_at = position.rows_trained, position.evaluated_step
        self.dp.job.in_flight.forget()
        self.bad_steps.rewind(position.bad_steps)
        self.meter.rewind(
            position.rows_unrecorded,
            seconds_unrecorded,
            resumed=position.step > 0,
            compiled=self._begun and position.step > 0,
        )
        del self.records[position.records :]

    def _train(self, state: TrainState) -> tuple[TrainState, bool]:
        """The rest of the epoch, or what is left of the steps.

        Returns:
            The state, and whether the run went back and is to go on from there.
        """
        if self._all_steps_done():
            return state, False
        epoch = self.place.epoch
        feed = self.dp.feed(self.source, epoch=epoch, first=self.place.batch)
        waited = 0.0
        with contextlib.closing(iter(feed)) as items:
            batches = _Ahead(items)
            for batch in batches:
                waited = self._note_wait(feed.wait_seconds, waited)
                state, restored = self._step(state, batch)
                if restored is not None:
                    return self._go_back(restored), True
                stop = self.stopping.vote()
                if self.run is not None:
                    self.run.tell()
                    if not stop and self.run.due(self.step, self.stopping.save_due):
                        restored = self._save(state, self._all_steps_done() or batches.ended)
                        if restored is not None:
                            return self._go_back(restored), True
                if stop or self._all_steps_done():
                    break
            closing = self._all_steps_done() or not self._resumable or batches.ended
        last = self.stopping.wanted or self._all_steps_done() or epoch + 1 == self.epochs
        look = last or self.eval_feed is not None
        restored = self._follow(state, 0, closing=closing, look=look)
        return (state, False) if restored is None else (self._go_back(restored), True)

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Restored | None]:
        """One step, and where to go on from, where that is not after it."""
        if not self._begun:
            self._begin(state, batch)
        sample = None if self.noise is None else self.noise.take(self.step, state, batch)
        state, metrics = self.dp.step(state, batch)
        place = self.place = Place(self.step + 1, self.place.epoch, self.place.batch + 1)
        self.rows += batch.rows or 0
        self.display.step(self.step)
        self.ledger.beat()
        table = None if self.audit is None else self.audit.take(state, place)
        self.dp.job.in_flight.note(dispatched(place, batch, metrics, table))
        waits = not self.meter.is_timing or (self.audit is not None and self.audit.waits(place))
        noise = [] if sample is None else [noise_record(sample, self.step, place.epoch)]
        restored = self._follow(state, 0 if waits else STEPS_IN_FLIGHT, noise)
        if restored is not None:
            return state, restored
        if not self._begun:
            self._begun = True
            self.ledger.enter("productive")
            if self.eval_feed is not None:
                self.dp.check(self.eval_feed)
        return state, None

    def _begin(self, state: TrainState, batch: Batch) -> None:
        """Compile: until that is done, a signal may end the run at once, as nothing is lost."""
        self.ledger.enter("compiling")
        if self.run is not None and not self.run.knows_program:
            self.run.check_program(program_fingerprint(self.dp, state, batch))
        self.display.status("compiling the step")
        if self.noise is not None:
            self.noise.prepare(state, batch)
        self.dp.prepare(state, batch)
        self.interrupt.hold()

    def _follow(
        self,
        state: TrainState,
        may_remain: int,
        more: Sequence[Record] = (),
        *,
        closing: bool = False,
        look: bool = False,
    ) -> Restored | None:
        """Follow the steps that have finished; return where to go on from, if it is not here.

        Args:
            state: after the newest step.
            may_remain: steps that are not waited for.
            more: records to keep after theirs.
            closing: whether the epoch or the run ends here: then there is a record of it. Where it
                only stops, there is none, and who goes on from there leaves the same records.
            look: whether to audit `state` in any case.
        """
        done, records = [], []
        for step in self.dp.job.in_flight.notes(may_remain):
            done.append(step)
            self._keep(self.bad_steps.finished(step))
            records += self.meter.finished(step)
        if self.audit is not None:
            restored = self.audit.after(state, self.place, done, look=look)
            if restored is not None:
                return restored
        self._keep([*records, *more, *(self.meter.flush() if closing else ())])
        self.bad_steps.check()
        self.note_good()
        return None

    def _save(self, state: TrainState, closing: bool) -> Restored | None:
        """Save, as all processes do after this step; where to go on from, as in `_follow`."""
        assert self.run is not None
        restored = self._follow(state, 0, closing=closing, look=True)
        if restored is None:
            started = time.perf_counter()
            self.run.save(state, self.position(), self.extra())
            self.stopping.saved()
            self.meter.leave_out(time.perf_counter() - started)
        return restored

    def _note_wait(self, now: float, before: float) -> float:
        self.meter.add_wait(now - before)
        self.ledger.move("productive", "waiting", now - before)
        return now

    def note_good(self) -> None:
        """Where this is a place to come back to, note what is to be counted on from then."""
        if self.audit is not None and self.audit.keeps and self.audit.good == self.place:
            self.good = self.position(), self.meter.unrecorded[1]
            self._good_at = time.monotonic()

    def _go_back(self, restored: Restored) -> TrainState:
        """Go on from an earlier step: what came after it has not been."""
        assert self.good is not None
        lost, place = self.step - restored.place.step, restored.place
        self.display.line(f"restored step {place.step:,}, {lost} steps back: {restored.text}")
        position, seconds = self.good
        self.ledger.move("productive", "lost", time.monotonic() - self._good_at)
        self.stand_at(position, place.batch, seconds)
        if self.run is not None and self.run.folder is not None:
            self.run.folder.keep(position.records)
        told = {"steps_lost": float(lost)}
        told |= {f"device_{device}": 1.0 for device in restored.devices}
        self._keep([Record("restore", place.step, place.epoch, told, 0, 0.0)])
        self.good = self.position(), seconds
        return restored.state

    def _evaluate(self, state: TrainState) -> None:
        """Evaluate where there is something to evaluate on, and say how the epoch went."""
        epoch, started = self.place.epoch, time.perf_counter()
        record = None
        if self.eval_feed is not None:
            metrics = self.dp.evaluate(
                state, self._until_stopped(self.eval_feed), ema=self.eval_ema
            )
            if self.stopping.wanted:
                return  # it is done whole when the run goes on
            rows = int(metrics.pop("rows"))
            seconds = time.perf_counter() - started
            record = Record("eval", self.step, epoch, metrics, rows, seconds)
        self.evaluated_at = self.step
        if record is not None:
            self._keep([record])
        trained = [r for r in self.records if r.kind == "train" and r.epoch == epoch]
        self.display.line(epoch_line(epoch, self.epochs, self.step, trained, record))
        self.meter.leave_out(time.perf_counter() - started)

    def _until_stopped(self, feed: Feed) -> Iterator[Batch]:
        with contextlib.closing(iter(feed)) as batches:
            for batch in batches:
                yield batch
                self.ledger.beat()
                if self.stopping.vote(unit="batch"):
                    return

    def _keep(self, records: Sequence[Record]) -> None:
        for record in records:
            self.records.append(record)
            if self.run is not None and self.run.folder is not None:
                self.run.folder.append(record)
            if record.kind == "train":
                self.display.record(record)
            if record.kind == "skip":
                self.display.line(skip_line(record))
            if record.kind == "eval" and not math.isfinite(record.metrics.get("loss", 0.0)):
                raise DivergedError(
                    f"the eval loss is {record.metrics['loss']} at step {record.step}; training "
                    "cannot go on from it: lower the learning rate, or clip the gradient"
                )

    @property
    def _resumable(self) -> bool:
        return self.run is not None and self.run.saving.wanted

    def _all_steps_done(self) -> bool:
        return self.total is not None and self.step >= self.total


class _Ahead:
    """Iterates over batches, and can tell whether there are more."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._next: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._next.pop() if self._next else next(self._batches)

    @property
    def ended(self) -> bool:
        """Whether the last batch was the last one; waits for the next where need be."""
        if not self._next:
            self._next.extend(itertools.islice(self._batches, 1))
        return not self._next

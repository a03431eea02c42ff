"""The training loop: epochs, evaluations, records, checkpoints."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Generator
from typing import Any

from replicax.core.data.feed import Feed, GaveUpError
from replicax.core.data.share import Batches, FeedItem
from replicax.core.ground.in_flight import STEPS_IN_FLIGHT
from replicax.core.step.loss import LOSS
from replicax.errors import DivergedError, StateError
from replicax.train.dispatched import dispatched, finished
from replicax.train.files.records import Record
from replicax.train.folder.goodput import Ledger
from replicax.train.folder.program_fingerprint import program_fingerprint
from replicax.train.hooks.call_sizes import CallSizes
from replicax.train.run.ahead import Ahead
from replicax.train.run.records_file import RecordsFile
from replicax.train.run.requests import Requests
from replicax.train.run.stopping import Interrupt


class Loop(Requests):
    """The loop of a run: steps and epochs, and what is done between them.

    `rx.Run`, its only subclass, opens, resumes and ends the run; users and hooks see one object.
    """

    _first: Feed
    _ledger: Ledger
    _interrupt: Interrupt
    _calls: CallSizes
    _file: RecordsFile

    def __init__(self) -> None:
        super().__init__()
        self._begun = False  # whether a step was done in this start
        self._compiled = set[int]()  # numbers of steps of calls
        self._given: FeedItem | None = None  # the newest, if not stepped on yet
        self._stream: Generator[FeedItem] | None = None
        self._ended = False  # whether all batches of the run were yielded

    def step(self, batch: FeedItem) -> dict[str, Any]:
        """Do the step on the batch yielded last, or the steps, and return its metrics.

        They are as those of `DataParallel.step`, or `steps`: reading one waits for the step.

        Raises:
            StateError: the batch is another one, or was stepped on already.
            ReplicaxError: as in `DataParallel.step`, and errors of hooks.
        """
        if batch is not self._given:
            raise StateError(
                "run.step got a batch other than the last one yielded, or the same batch twice: "
                "call run.step once on each batch, by which a run tracks its position"
            )
        if not self._begun:
            self._begin(batch)
        self.hooks("before_step", self, batch)
        if isinstance(batch, Batches):
            self._prepare(batch)
        run = self.dp.steps if isinstance(batch, Batches) else self.dp.step
        (self.state, told), self._given = run(self.state, batch), None
        self._run_state.stepped(batch)
        self.dp.job.in_flight.note(call := dispatched(self.place, batch, told))
        self._ledger.beat()
        self.hooks("dispatched", self, call.last)
        waits, self._waits = self._waits or not self._run_state.meter.is_timing, False
        self._follow(0 if waits else STEPS_IN_FLIGHT)
        if not self._begun:
            self._begun = True
            self._ledger.enter("productive")
            if self._evaluator is not None:
                self._evaluator.check()
        return call.metrics

    def _batches(self) -> Generator[FeedItem]:
        """Yield the batches of all epochs or steps, or until the run stops."""
        while True:
            if not self._all_steps_done() and self._stopping.why is None:
                went_back = yield from self._epoch()
                if went_back:
                    continue
            self._close_epoch()
            if self._is_last():
                break
            self._run_state.next_epoch()
        self._ended = True

    def _epoch(self) -> Generator[FeedItem, None, bool]:
        """Yield the remaining batches of the epoch, or of the steps."""
        self._evaluate_if_due()
        self.source.set_epoch(self.place.epoch)
        feed = self._first.at(self.place.epoch, self.place.batch, self._calls.sizes(self.place))
        feed.stops = self._gives_up
        waited = 0.0
        with contextlib.closing(iter(feed)) as items:
            batches, number = Ahead(items), -1
            for number, batch in enumerate(batches):
                before, waited = waited, feed.wait_seconds
                self._run_state.meter.add_wait(waited - before)
                self._ledger.move("productive", "waiting", waited - before)
                if number == 0 and self.source.batches is None:
                    self._run_state.reread.check(feed, batch, begun=self._begun)
                self._given = batch
                yield batch
                if self._given is batch:
                    raise StateError(
                        f"no step was done on batch {self.place.batch} of epoch {self.place.epoch};"
                        " a run tracks its position by one step per batch: call run.step(batch) on "
                        "each batch, and filter rows in the source"
                    )
                if self._went_back() or self._do_what_is_due(batches):
                    return True
                if self._stopping.over or self._all_steps_done():
                    break
            if number < 0 and not batches.gave_up and self.source.batches is None:
                self._run_state.reread.check_end(feed, begun=self._begun)
            if batches.gave_up:  # all processes did
                self._ledger.move("productive", "waiting", feed.wait_seconds - waited)
                self._stopping.vote(now=True)
            closing = self._all_steps_done() or not self._resumable or batches.ended
        due = self._is_last() or self._evaluator is not None
        return self._settle(closing=closing, due=due)

    def _do_what_is_due(self, batches: Ahead) -> bool:
        """Evaluate and save between two steps if due; return whether the run went back."""
        self._stopping.vote(admits=True)
        self._meet_members()
        if self._storage is not None:
            self._storage.tell()
        if not self._stopping.wanted and self._evaluate_if_due():
            return True
        if not self._stopping.wanted and self._save_is_due():
            if self._settle(closing=self._all_steps_done() or batches.ended):
                return True
            self._save()
        return False

    def _close_epoch(self) -> None:
        """Evaluate if due, and call the hooks at the end of an epoch or of the run."""
        if self._stopping.wanted or self.place.step == self._run_state.closed_at:
            return
        self.state = self.dp.end_round(self.state) if self._is_last() else self.state
        record = None
        evaluator, here = self._evaluator, self.place
        due = self._is_last() or (evaluator and evaluator.is_due(here, epoch_over=True))
        if evaluator is not None and due and self._run_state.evaluated_at != here.step:
            record = self._evaluate()
            if record is None:
                return  # it is repeated in full when the run resumes
        self._run_state.closed_at = self.place.step
        self.hooks("epoch", self, record)
        self._stopping.vote(now=True)
        if self._save_is_due(asked=True):
            self._save()

    def _evaluate_if_due(self) -> bool:
        """Evaluate between two steps if due; return whether the run went back."""
        if self._evaluator is None or self._run_state.evaluated_at == self.place.step:
            return False
        asked = self._stopping.evaluation_due
        if not asked and not self._evaluator.is_due(self.place, epoch_over=False):
            return False
        if self._settle():
            return True
        self._evaluate()
        self._stopping.vote(now=True)
        return False

    def _evaluate(self) -> Record | None:
        assert self._evaluator is not None
        started, record = time.perf_counter(), None
        try:
            with self._ledger.spending("evaluating"):
                record = self._evaluator(self.state, self.place, self._stops)
        except GaveUpError:
            self._stopping.vote(now=True)
        if record is None or self._stopping.wanted:
            return None
        self._stopping.evaluation_due = False
        self._run_state.evaluated_at = self.place.step
        self.keep(record)
        for name, value in record.metrics.items():
            if name.rpartition("/")[2] == LOSS and not math.isfinite(value):
                raise DivergedError(
                    f"the eval {name} is {value} at step {record.step}; training cannot continue: "
                    "lower the learning rate, or clip the gradient"
                )
        self.hooks("evaluation", self, record)
        self._run_state.meter.leave_out(time.perf_counter() - started)
        return record

    def _stops(self) -> bool:
        self._ledger.beat()
        self._stopping.vote(unit="batch")
        return self._stopping.wanted

    def _begin(self, batch: FeedItem) -> None:
        """Compile; until then a signal may end the run at once, as nothing is lost."""
        self._ledger.enter("compiling")
        if self._storage is not None and not self._storage.knows_program:
            traced = self._storage.traced
            program = program_fingerprint(self.dp, self.state, batch.first, traced=traced)
            self._storage.check_program(program)
        self._display.status("compiling the step")
        self.dp.prepare(self.state, batch)
        if self._storage is not None and self.dp.mode.bitwise:
            compiled = self.dp.program(self.state).step.compiled(self.state, batch.first)
            self._storage.check_bits({each.name: each.digest for each in compiled})
        self._interrupt.hold()

    def _prepare(self, batches: Batches) -> None:
        """Compile, if the first call of so many steps comes; records leave out that time."""
        if len(batches) in self._compiled:
            return
        self._compiled.add(len(batches))
        self.dp.job.in_flight.drain()  # or steps would finish in the time that is left out
        started = time.perf_counter()
        self.dp.prepare(self.state, batches)
        seconds = time.perf_counter() - started
        self._ledger.move("productive", "compiling", seconds)
        self._run_state.meter.leave_out(seconds)

    def _follow(self, may_remain: int, *, closing: bool = False, due: bool = False) -> None:
        """Process the finished steps; a hook may then ask the run to go back.

        Args:
            may_remain: number of newest calls not to wait for.
            closing: whether the epoch or the run ends here, which adds a record. A run that is
                interrupted adds none, so that a resumed run writes the same records.
            due: whether the state is about to be saved or evaluated, or the run to end.
        """
        made: list[Record] = []
        for step, ready in finished(self.dp.job.in_flight, may_remain):
            made += self._run_state.bad_steps.finished(step)
            self.hooks("step", self, step)
            made += map(self._with_figures, self._run_state.meter.finished(step, ready))
        self.hooks("settle", self, due)
        if self._back is not None:
            return
        if closing:
            made += map(self._with_figures, self._run_state.meter.flush())
        for record in made:
            self.keep(record)
        self._run_state.bad_steps.check()
        if self._good_at is not None:
            here = self._run_state
            self._good = here.position(), here.extra(), self._good_at, here.reread.last
            self._good_at = None

    def _with_figures(self, record: Record) -> Record:
        """Return `record` with the hooks' figures, before they see any later step."""
        return dataclasses.replace(record, figures=self.hooks.figures(self, record) or None)

    def _went_back(self) -> bool:
        """Go back to the position a hook asked for, if any, and discard the steps after it."""
        if self._back is None:
            return False
        (state, why, metrics), self._back = self._back, None
        assert self._good is not None
        position, extra, at, last = self._good
        lost = self.place.step - position.step
        self.say(f"restored step {position.step:,}, {lost} steps back: {why}")
        self._ledger.move("productive", "lost", time.monotonic() - at)
        self._run_state.load_state(position, extra, compiled=self._begun)
        self.state, self._run_state.reread.last = state, last
        self.hooks("rewound", self)
        told = {"steps_lost": float(lost), **metrics}
        self.keep(Record("restore", position.step, position.epoch, told, 0, 0.0))
        self._good = self._run_state.position(), extra, at, last
        return True

    def _settle(self, *, closing: bool = False, due: bool = True) -> bool:
        """Wait for all steps and process them; return whether the run went back."""
        self._follow(0, closing=closing, due=due)
        return self._went_back()

    def _meet_members(self, *, begins: bool = False, must: bool = False) -> None:
        """Record which islands joined and left, write if the one that did is gone, and give."""
        if self._stopping.leaves is not None:
            self._members.leave(self._stopping.leaves)
        if (storage := self._storage) and storage.follows and not self._members.follows:
            ledger = storage.tried_to_take_over(self.records, must=must)
            if ledger is not None and self.is_main:
                self._ledger, self._file.folder = ledger, storage.folder
                self.hooks("take_over", self)
        self._ledger.move("productive", "islands", self._members.delayed_seconds())
        for record, line in self._members.changes(self.place.step, self.place.epoch):
            self.keep(record)
            if self.is_main:
                self.alarm(line)
        if self._members.newcomers:
            self._follow(0)
            saved, votes = self._run_state.save_state(), self._stopping.save_state()
            self._members.give(self.state, saved, self.records, votes, begins=begins)

    def _save_is_due(self, *, asked: bool = False) -> bool:
        """Whether to save now; if `asked`, only because of the clock or a hook."""
        settings, step = self.dp.configuration.between, self.place.step
        if self._storage is None or not self._resumable or not settings.is_calm(step):
            return False
        every, before = self._storage.saving.every, max(step - settings.calm_steps, 0)
        by_step = every and before // every < step // every and not asked
        return bool(by_step or self._stopping.save_due)

    def _save(self) -> None:
        assert self._storage is not None
        started = time.perf_counter()
        self.hooks("saving", self)
        self._storage.save(self.state, *self._run_state.save_state())
        self._stopping.saved()
        self._run_state.meter.leave_out(time.perf_counter() - started)

    def _gives_up(self) -> bool:  # waiting for a batch; other islands would wait for this one
        return self._interrupt.wanted and not self._members.has_islands

    def _all_steps_done(self) -> bool:  # more may be done than are asked for by now
        steps = self.total is not None and self.place.step >= self.total
        return steps or (self.epochs is not None and self.place.epoch >= self.epochs)

    def _is_last(self) -> bool:
        over = self._stopping.over or self._all_steps_done()
        return over or self.place.epoch + 1 == self.epochs

"""The loop of a run: a batch, the step, hooks and records, an evaluation, a checkpoint."""

import contextlib
import importlib
import math
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any, Self

from replicax.core.data.feed import GaveUpError
from replicax.core.data.share import Batches, FeedItem
from replicax.core.ground.in_flight import STEPS_IN_FLIGHT
from replicax.core.step.loss import LOSS
from replicax.errors import DivergedError, StateError
from replicax.train.dispatched import RunPosition, dispatched
from replicax.train.files.records import Record
from replicax.train.folder.program_fingerprint import program_fingerprint
from replicax.train.run.open_run import OpenRun


class Loop:
    """Yields the batches of a run, and does what is due once the user has called `step` on each."""

    def __init__(self, run: OpenRun) -> None:
        self.run, self._parts, self._now = run, run.parts, run.parts.now
        self._dp, self._hooks, self._steps = run.parts.dp, run.parts.hooks, run.steps
        self._evaluator, self._stopping = run.parts.evaluator, run.stopping
        self._stream: Generator[FeedItem] | None = None
        self._ahead: _EpochBatches | None = None  # of the next epoch
        self._given: FeedItem | None = None  # the newest, if not stepped on yet
        self._ended = False  # whether all batches of the run were yielded
        self._compiled = set[int]()  # numbers of steps of calls
        self.waits = False
        """Whether a hook asked to wait for the step that was just dispatched."""

    def batches(self) -> Generator[FeedItem]:
        """Return the batches of all epochs or steps, or until the run stops."""
        self._stream = self._epochs()
        return self._stream

    def _epochs(self) -> Generator[FeedItem]:
        while True:
            if not self._now.is_done and self._stopping.hook_reason is None:
                went_back = yield from self._epoch()
                if went_back:
                    continue
            self._close_epoch()
            if self._is_last():
                break
            self._now.next_epoch()
        self._ended = True

    def _epoch(self) -> Generator[FeedItem, None, bool]:
        """Yield the remaining batches of the epoch; return whether the run went back."""
        self._evaluate_if_due()
        with contextlib.closing(self._opened()) as batches:
            for batch in batches:
                self._given = batch
                yield batch
                if self._given is batch:
                    raise StateError(
                        f"no step was done on batch {self._now.place.batch} of epoch "
                        f"{self._now.place.epoch}; a run tracks its position by one step per "
                        "batch: call run.step(batch) on each batch, and filter rows in the source"
                    )
                if self._steps.went_back():
                    return True
                # All processes decide first, at the same step; a vote may admit islands, which
                # are met before anything of this step is saved, as they take over from here.
                self._stopping.vote(admits=True)
                self.run.meet_members()
                self.run.storage.tell()
                # Evaluated, then saved: a run that resumes here does not evaluate again.
                if not self._stopping.interrupted and self._evaluate_if_due():
                    return True
                if not self._stopping.interrupted and self._save_is_due():
                    if self._steps.settle(closing=self._now.is_done or batches.ended):
                        return True
                    self._save()
                if self._stopping.is_ending or self._now.is_done:
                    break
            batches.end()
            if batches.gave_up:  # all processes did
                self._stopping.vote(now=True)
            closing = self._now.is_done or not self._parts.settings.resumable or batches.ended
        if not self._is_last() and batches.ended:
            self._ahead = _EpochBatches.ahead(self.run)
        due = self._is_last() or self._evaluator is not None
        return self._steps.settle(closing=closing, due=due)

    def _opened(self) -> "_EpochBatches":
        """Return the batches from the place of the run on, read ahead if it is as expected."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.place == self._now.place:
            return ahead
        if ahead is not None:
            ahead.close()
        return _EpochBatches(self.run, self._now.place)

    def step(self, batch: FeedItem) -> dict[str, Any]:
        """Implement `rx.Run.step`: the step, or the steps, on the newest batch."""
        now = self._now
        if batch is not self._given:
            raise StateError(
                "run.step got a batch other than the last one yielded, or the same batch twice: "
                "call run.step once on each batch, by which a run tracks its position"
            )
        if not now.begun:
            self._begin(batch)
        self._hooks("before_step", batch)
        if isinstance(batch, Batches):
            self._prepare(batch)
        run = self._dp.steps if isinstance(batch, Batches) else self._dp.step
        started, before = time.perf_counter(), now.place.step
        (now.state, results), self._given = run(now.state, batch), None
        now.stepped(batch)
        self.run.times.dispatched(now.place.step - before, time.perf_counter() - started)
        self.run.garbage.stepped(now.place.step)
        now.job.in_flight.note(call := dispatched(now.place, batch, results))
        self.run.ledger.beat()
        self._hooks("dispatched", call.last)
        # The first step is waited for: the clock of records starts when it has compiled.
        waits, self.waits = self.waits or not now.meter.is_timing, False
        self._steps.follow(0 if waits else STEPS_IN_FLIGHT)
        if not now.begun:
            now.begun = True
            self.run.garbage.begun(now.place.step)
            self.run.ledger.enter("productive")
            if self._evaluator is not None:
                self._evaluator.check()
        return call.metrics

    def _close_epoch(self) -> None:
        """Evaluate if due, and call the hooks at the end of an epoch or of the run."""
        now, is_last = self._now, self._is_last()
        if self._stopping.interrupted or now.place.step == now.closed_step:
            return
        now.state = self._dp.end_round(now.state) if is_last else now.state
        record, evaluator = None, self._evaluator
        due = is_last or (evaluator and evaluator.is_due(now.place, epoch_over=True))
        if evaluator is not None and due and now.evaluated_at != now.place.step:
            record = self._evaluate()
            if record is None:
                return  # it is repeated in full when the run resumes
        now.closed_step = now.place.step
        self._hooks("epoch", record)
        self._stopping.vote(now=True)
        if self._save_is_due(by_step=False):
            self._save()

    def _is_last(self) -> bool:
        now = self._now
        return self._stopping.is_ending or now.is_done or now.place.epoch + 1 == now.epochs

    def _evaluate_if_due(self) -> bool:
        """Evaluate between two steps if due; return whether the run went back."""
        place = self._now.place
        if self._evaluator is None or self._now.evaluated_at == place.step:
            return False
        asked = self._stopping.evaluation_due
        if not asked and not self._evaluator.is_due(place, epoch_over=False):
            return False
        if self._steps.settle():
            return True
        self._evaluate()
        self._stopping.vote(now=True)
        return False

    def _evaluate(self) -> Record | None:
        assert self._evaluator is not None
        self.run.times.interrupted()
        started, record, now = time.perf_counter(), None, self._now
        try:
            with self.run.ledger.spending("evaluating"):
                record = self._evaluator(now.state, now.place, self._stops)
        except GaveUpError:
            self._stopping.vote(now=True)
        if record is None or self._stopping.interrupted:
            return None
        self._stopping.evaluation_due = False
        now.evaluated_at = now.place.step
        self._parts.keep(record)
        for name, value in record.metrics.items():
            if name.rpartition("/")[2] == LOSS and not math.isfinite(value):
                raise DivergedError(
                    f"the eval {name} is {value} at step {record.step}; training cannot continue: "
                    "lower the learning rate, or clip the gradient"
                )
        self._hooks("evaluation", record)
        now.meter.leave_out(time.perf_counter() - started)
        return record

    def _stops(self) -> bool:
        self.run.ledger.beat()
        self._stopping.vote(unit="batch")
        return self._stopping.interrupted

    def _save_is_due(self, *, by_step: bool = True) -> bool:
        """Whether to save now: because of the number of steps, the clock, or a hook's request."""
        run, step = self._parts.settings, self._now.place.step
        between = self._dp.configuration.between
        if not run.resumable or not between.is_boundary(step):
            return False
        every, before = run.saving.every, max(step - between.boundary_interval, 0)
        passed = every and before // every < step // every
        return bool((by_step and passed) or self._stopping.save_due)

    def _save(self) -> None:
        self.run.times.interrupted()
        started = time.perf_counter()
        self._hooks("saving")
        self.run.storage.save(self._now.state, *self._now.save_state())
        self._stopping.saved()
        self._now.meter.leave_out(time.perf_counter() - started)

    def _begin(self, batch: FeedItem) -> None:
        """Compile; until then a signal may end the run at once, as nothing is lost."""
        state, storage = self._now.state, self.run.storage
        self.run.ledger.enter("compiling")
        self.run.times.interrupted()
        if not storage.knows_program:
            program = program_fingerprint(self._dp, state, batch.first, traced=storage.traced)
            storage.check_program(program)  # before the compilation, which may take minutes
        self._parts.display.status("compiling the step")
        if self._parts.settings.resumable:  # beside the compilation, not in the first save
            threading.Thread(target=importlib.import_module, args=("orbax.checkpoint",)).start()
        self._dp.prepare(state, batch)
        if self._dp.mode.bitwise and self._parts.settings.run_dir is not None:
            compiled = self._dp.program(state).step.compiled(state, batch.first)
            storage.check_bits({each.name: each.digest for each in compiled})
        self._parts.interrupt.hold()

    def _prepare(self, batches: Batches) -> None:
        """Compile, if the first call of so many steps comes; records leave out that time."""
        if len(batches) in self._compiled:
            return
        self._compiled.add(len(batches))
        self._now.job.in_flight.drain()  # or steps would finish in the time that is left out
        self.run.times.interrupted()
        started = time.perf_counter()
        self._dp.prepare(self._now.state, batches)
        seconds = time.perf_counter() - started
        self.run.ledger.move("productive", "compiling", seconds)
        self._now.meter.leave_out(seconds)

    def leave(self) -> None:
        """End the iteration; process the steps if it was left early."""
        self.close()
        if not self._ended:
            self._steps.settle(closing=not self._parts.settings.resumable)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._ahead is not None:
            self._ahead.close()


class _EpochBatches(Iterator[FeedItem]):
    """Yields the batches from a place of a run on; knows whether there are more."""

    def __init__(self, run: OpenRun, place: RunPosition) -> None:
        parts, now, self.place = run.parts, run.parts.now, place
        now.source.set_epoch(place.epoch)
        self._feed = parts.feed.at(place.epoch, place.batch, run.calls.sizes(place))
        self._feed.stops = parts.gives_up
        self._items: Generator[FeedItem] = iter(self._feed)
        self._run, self._now = run, now
        self._next: list[FeedItem] = []
        self._has_begun, self._waited = False, 0.0
        self.gave_up = False
        """Whether the next batch did not come before the run had to stop."""

    @classmethod
    def ahead(cls, run: OpenRun) -> Self | None:
        """Begin to read the next epoch while this one ends, if that changes nothing else."""
        now = run.parts.now
        if not now.source.reads_ahead:
            return None
        batches = cls(run, now.place.next_epoch())
        batches.ended  # noqa: B018  (reads the first)
        now.job.rest()  # what is done between two epochs may take long
        return batches

    def __next__(self) -> FeedItem:
        batch = self._next.pop() if self._next else self._read()
        self._now.meter.add_wait(self._count_wait())
        if not self._has_begun and self._now.source.batches is None:
            self._now.reread.check(self._feed, batch, begun=self._now.begun)
        self._has_begun = True
        return batch

    @property
    def ended(self) -> bool:
        """Whether there are no more batches; may wait for the next one."""
        if not self._next and not self.gave_up:
            with contextlib.suppress(StopIteration):
                self._next.append(self._read())
        return not self._next and not self.gave_up

    def end(self) -> None:
        """Compare a pass that had no batch; count the wait for one that did not come."""
        if self.gave_up:
            self._count_wait()
        elif not self._has_begun and self._now.source.batches is None:
            self._now.reread.check_end(self._feed, begun=self._now.begun)

    def close(self) -> None:
        self._items.close()

    def _read(self) -> FeedItem:
        try:
            return next(self._items)
        except GaveUpError:
            self.gave_up = True
            raise StopIteration from None

    def _count_wait(self) -> float:
        """Return the seconds waited since the last call, once the ledger has them."""
        before, self._waited = self._waited, self._feed.wait_seconds
        self._run.ledger.move("productive", "waiting", self._waited - before)
        return self._waited - before

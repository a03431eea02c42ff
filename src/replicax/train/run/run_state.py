"""The state of a run: its `TrainState`, its place, its counts, and how it moves to a saved one."""

import dataclasses
from typing import Any

import jax

from replicax.core.data.loader_state import LoaderState
from replicax.core.data.share import Batches, FeedItem
from replicax.core.data.sources import PerProcessSource, Source
from replicax.core.ground.job import Job
from replicax.core.ground.train_state import TrainState
from replicax.errors import ConfigError
from replicax.train.checkpoints.arrays import abstract
from replicax.train.checkpoints.manifest import Position
from replicax.train.dispatched import RunPosition
from replicax.train.files.records import Record
from replicax.train.folder.read_again import RereadCheck
from replicax.train.folder.storage import Storage
from replicax.train.hooks.hook import Hooks
from replicax.train.run.evaluator import Evaluator
from replicax.train.run.members import GivenRun
from replicax.train.run.step_records import BadSteps, Meter


@dataclasses.dataclass
class RunState:
    """The state and the place of a run, its counts, and its parts that checkpoints keep."""

    state: TrainState
    """After the newest step; the next may donate it."""
    source: Source
    job: Job
    hooks: Hooks
    meter: Meter
    bad_steps: BadSteps
    evaluator: Evaluator | None
    reread: RereadCheck
    epochs: int | None = None
    total: int | None = None
    """Steps of the run, if known."""
    place: RunPosition = dataclasses.field(default=RunPosition(0, 0, 0))
    begun: bool = False
    """Whether a step was done in this start, for which it was compiled."""
    error: BaseException | None = None
    """The exception that ended the run."""
    rows: int = 0
    """Rows trained on in the whole run."""
    records: list[Record] = dataclasses.field(default_factory=list)
    evaluated_at: int = -1
    """Step of the last evaluation."""
    source_state: LoaderState | None = None
    """State of this process's source before the next batch, if it has any."""
    closed_step: int = -1
    """Step at which an epoch or the run was last closed, after its evaluation."""

    def stepped(self, batch: FeedItem) -> None:
        """Count the step that was dispatched on `batch`, or the steps."""
        rows = batch.rows if isinstance(batch, Batches) else (batch.rows,)
        here, steps = self.place, len(rows)
        self.place = RunPosition(here.step + steps, here.epoch, here.batch + steps)
        self.rows += sum(each or 0 for each in rows)
        self.source_state = batch.source_state
        self.reread.trained_on(batch.hosts[1] if isinstance(batch, Batches) else batch.host)

    def next_epoch(self) -> None:
        self.place = self.place.next_epoch()

    @property
    def is_done(self) -> bool:
        """Whether all steps are done; more may be than are asked for by now."""
        steps = self.total is not None and self.place.step >= self.total
        return steps or (self.epochs is not None and self.place.epoch >= self.epochs)

    def position(self) -> Position:
        """Return the current position, once all due records are written."""
        rows, whole = self.place.batch * self.source.batch_size, _rows_in_order(self.source)
        return Position(
            step=self.place.step,
            epoch=self.place.epoch,
            rows=rows if whole is None else min(rows, whole),
            evaluated_step=max(self.closed_step, 0),
            rows_trained=self.rows,
            rows_unrecorded=self.meter.rows,
            records=len(self.records),
            bad_steps=self.bad_steps.in_a_row,
        )

    def extra(self) -> dict[str, Any]:
        """Return the rest, as JSON values, with which a run that goes on can go back to here."""
        return {
            "batch": self.place.batch,
            "batch_size": self.source.batch_size,
            "evaluated": self.evaluated_at,
            "meter": self.meter.save_state(),
            "hooks": self.hooks.save_state(self.place.step),
            "source_states": [self.source_state],
            **parts_of_processes(self.source),
        }

    def save_state(self) -> tuple[Position, dict[str, Any]]:
        """Return the position and the rest for a checkpoint, from which a new start resumes."""
        position, extra = self.position(), self.extra()
        if self.source.batches is None:
            extra |= self.reread.save_state()
            mine = self.source_state and dataclasses.asdict(self.source_state)
            extra["source_states"] = self.job.gather("the state of the data", mine)
        if self.evaluator is not None:
            extra["evaluation"] = self.evaluator.save_state()
        return position, extra

    def load_state(self, position: Position, extra: dict[str, Any]) -> None:
        """Move to `position`, and discard everything after it; `extra["batch"]` is the next one."""
        self.place = RunPosition(position.step, position.epoch, extra["batch"])
        self.rows, self.closed_step = position.rows_trained, position.evaluated_step
        self.evaluated_at = extra["evaluated"]
        self.reread.load_state(extra)
        states = extra.get("source_states", [None])
        mine = states[self.job.process if len(states) == self.job.processes else 0]
        self.source_state = LoaderState(**mine) if isinstance(mine, dict) else mine
        self.source.restore(self.source_state)
        if self.evaluator is not None:
            self.evaluator.load_state(extra.get("evaluation", {}))
        self.job.in_flight.forget()
        self.bad_steps.rewind(position.bad_steps)
        resumed = position.step > 0  # else step 1 comes again, whose record is its own and untimed
        self.meter.rewind(extra["meter"], resumed=resumed, compiled=self.begun and resumed)
        self.hooks.load_state(position.step, extra.get("hooks", {}))
        del self.records[position.records :]

    def restore(self, storage: Storage, *, donate: bool) -> None:
        """Move to the checkpoint that `storage` found; `donate` the state that it replaces."""
        point = storage.found
        assert point is not None
        batch = first_batch(self.source, point.position, point.extra)
        if self.epochs is not None and self.source.batches is not None:  # in the current batches
            remaining = (self.epochs - point.position.epoch) * self.source.batches - batch
            self.total = point.position.step + max(remaining, 0)
        like = abstract(self.state)
        if donate:  # before there is another: a device may have no room for two
            for leaf in jax.tree.leaves(self.state):
                leaf.delete()
        self.records.extend(point.records)
        self.load_state(point.position, {**point.extra, "batch": batch})
        self.state = storage.restore(like)

    def receive(self, given: GivenRun) -> None:
        """Move to the place of the run that another island gave to this one."""
        like = abstract(self.state)
        self.records.extend(given.records)
        self.load_state(given.position, given.extra)
        self.state = given.state(like)
        given.arrays.clear()  # it is on the devices now


def expected_steps(source: Source, epochs: int | None, total: int | None) -> int | None:
    """Return the steps of a run, if known or told by `len()` of a loader; for figures only."""
    if total is not None or epochs is None or source.told_batches is None:
        return total
    return epochs * source.told_batches


def first_batch(source: Source, position: Position, extra: dict[str, Any]) -> int:
    """Return the next batch of `position.epoch`, counted from 0; derived from rows if known.

    Rows have the same order for any number of processes; the batch size may have changed.
    """
    before = extra.get("processes")
    now = parts_of_processes(source).get("processes")
    if before != now:
        fed = [f"rx.ProcessLocal in {n} processes" if n else "shared data" for n in (before, now)]
        raise ConfigError(
            f"the run was fed by {fed[0]} and is now fed by {fed[1]}, which changes the order of "
            "rows: use the same source and number of processes, or start a new run"
        )
    batch: int = extra["batch"]
    size = source.batch_size
    if extra["batch_size"] == size or not size or not position.rows:
        return batch
    if position.rows == _rows_in_order(source):
        return source.batches or 0
    if position.rows % size:
        raise ConfigError(
            f"the run stopped {position.rows:,} rows into epoch {position.epoch} and batch_size="
            f"{size} does not divide that; the next batch must start there: use a batch size that "
            "divides it"
        )
    return position.rows // size


def _rows_in_order(source: Source) -> int | None:
    """Return the rows of an epoch, if all batches but the last are full.

    Where processes have rows of their own, some may run out early, so the row count does not
    determine the batch.
    """
    return None if isinstance(source, PerProcessSource) else source.rows


def parts_of_processes(source: Source) -> dict[str, int]:
    """The number of processes, if each has its own rows; else empty."""
    separate = isinstance(source, PerProcessSource)
    return {"processes": jax.process_count()} if separate else {}

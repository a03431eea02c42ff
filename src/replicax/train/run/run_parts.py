"""The parts of a run before it is entered: all that is made of its arguments, and not open."""

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from replicax.core.data.feed import Feed
from replicax.core.data.sources import as_source
from replicax.core.data_parallel import DataParallel
from replicax.core.ground.train_state import TrainState
from replicax.errors import ConfigError
from replicax.text.streams import alarm as print_alarm
from replicax.train.checkpoints.store import is_complete
from replicax.train.files.records import Record, RunFolder
from replicax.train.folder.read_again import RereadCheck
from replicax.train.guarded import at_start, guarded, judged
from replicax.train.hooks.curves import Curves
from replicax.train.hooks.hook import Hook, Hooks, Running
from replicax.train.hooks.progress import Progress, open_progress
from replicax.train.run.evaluator import ONLY_ONCE, Evaluator
from replicax.train.run.members import Members
from replicax.train.run.run_state import RunState, expected_steps
from replicax.train.run.settings import Settings
from replicax.train.run.step_records import BadSteps, Meter, log_interval
from replicax.train.run.stopping import Interrupt


class RecordsFile(Hook):
    """Write each record to `records.jsonl`, immediately visible to readers.

    `status.json` has the newest one of each kind.
    """

    folder: RunFolder | None = None
    """The run's folder, if any; in process 0."""

    def __init__(self) -> None:
        self._newest: dict[str, Any] = {}

    def record(self, run: Running, record: Record) -> None:
        if self.folder is not None:
            self.folder.append(record)
            self._newest[record.kind] = json.loads(record.to_json())
            at = {"time": time.time(), "step": record.step, "steps": run.total}
            self.folder.tell({**at, "epoch": record.epoch, **self._newest})

    def rewound(self, run: Running) -> None:
        if self.folder is not None:
            self.folder.keep(len(run.records))


@dataclasses.dataclass(frozen=True)
class RunParts:
    """The parts of a run, which all that it does works on."""

    settings: Settings
    dp: DataParallel
    """Runs the steps, and skips bad ones."""
    feed: Feed
    """The batches of the first epoch."""
    now: RunState
    hooks: Hooks
    file: RecordsFile
    display: Progress
    evaluator: Evaluator | None
    members: Members
    interrupt: Interrupt
    config: dict[str, Any]
    """The contents of `config.json`."""
    alarm: Callable[[str], None]
    """Prints a line to stderr, in every process."""

    def say(self, line: str) -> None:
        """Print a permanent line; in process 0 only, and only if `progress` is on."""
        self.display.line(line)

    def keep(self, record: Record) -> None:
        self.now.records.append(record)
        self.hooks("record", record)

    def gives_up(self) -> bool:
        """Whether to stop waiting for a batch; other islands would wait for this one."""
        return self.interrupt.wanted and not self.members.has_islands


def assemble(
    run: Running,
    dp: DataParallel,
    state: TrainState,
    source: Any,
    hooks: Sequence[Hook],
    settings: Settings,
) -> RunParts:
    """Return the parts of `run`, as its hooks see it."""
    job, epochs, steps, guard = dp.job, settings.epochs, settings.steps, settings.guard
    size = settings.batch_size
    opened = as_source(source, size, job, shuffle=settings.shuffle, seed=settings.seed)
    if (epochs or 0) > 1 and not opened.can_repeat:
        raise ConfigError(f"epochs={epochs} of a source {ONLY_ONCE}, or steps=...")
    job.agree("the run", settings.agreed())
    interrupt = settings.interrupt or Interrupt(terminate=settings.resumable)
    members = Members(
        job, lambda: interrupt.wanted, lambda: is_complete(settings.run_dir, now.total)
    )
    with dp.configuration.in_own_mesh():
        state = at_start(dp, state, guard)
    feed = dp.feed(opened, prefetch=settings.prefetch)
    total = steps
    if epochs is not None and feed.padding is not None:
        total = epochs * len(feed)
    expected = expected_steps(opened, epochs, total)

    def alarm(line: str) -> None:
        print_alarm(line, f"process {job.process}: " if job.processes > 1 else "")

    file = RecordsFile()
    display = open_progress(settings.progress and members.speaks, expected)
    ours = [display, *([] if settings.run_dir is None else [Curves()])]
    called = Hooks([file, *hooks, *ours], run, alarm, [file, *ours])
    steps_on, evaluator = guarded(dp, state, called.wraps), None
    if (plan := settings.evaluation) is not None:
        evaluator = Evaluator(plan, steps_on, state, size, lambda: parts.gives_up(), display.line)
        evaluator.check_passes(epochs or -(-(steps or 1) // (opened.batches or steps or 1)))
    now = RunState(
        state,
        opened,
        job,
        called,
        Meter(settings.log_every or log_interval(expected)),
        BadSteps(guard.max_bad_steps, job, judged(dp, state)),
        evaluator,
        RereadCheck(job, display.line, alarm, accept=settings.accept_changes),
        epochs,
        total,
    )
    about = members, interrupt, dict(settings.config), alarm
    parts = RunParts(settings, steps_on, feed, now, called, file, display, evaluator, *about)
    return parts

"""`Run`, a training run as an object, and `fit`, a whole run in one call."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from replicax.core.data.share import FeedItem
from replicax.core.data.sources import as_source, can_shuffle
from replicax.core.data_parallel import DataParallel
from replicax.core.first_step.argument_checks import check_is_state
from replicax.core.ground.train_state import TrainState, was_donated
from replicax.errors import (
    ConfigError,
    DivergedError,
    IslandLeftError,
    ReplicaxError,
    RunInUseError,
    StateError,
    Terminated,
    interrupted,
)
from replicax.text.arguments import Count, Int32Count, Natural, Seed, typed_but
from replicax.train.checkpoints.arrays import check_storable, params_not_finite
from replicax.train.checkpoints.store import is_complete
from replicax.train.files.fingerprint import sha256
from replicax.train.files.places import exists, place, writing
from replicax.train.files.records import CONFIG, plain_config
from replicax.train.folder.goodput import Ledger
from replicax.train.folder.program_fingerprint import program_fingerprint, some_rows
from replicax.train.folder.read_again import RereadCheck
from replicax.train.folder.saving import Saving
from replicax.train.folder.storage import Storage
from replicax.train.guarded import Guard, at_start, guarded, judged
from replicax.train.hooks.call_sizes import call_sizes
from replicax.train.hooks.curves import Curves
from replicax.train.hooks.hook import Hook, Hooks
from replicax.train.hooks.progress import open_progress
from replicax.train.run.evaluator import ONLY_ONCE, Evaluator, as_evaluation
from replicax.train.run.members import Members
from replicax.train.run.records_file import RecordsFile
from replicax.train.run.resuming import Resuming
from replicax.train.run.run_state import RunState
from replicax.train.run.step_records import BadSteps, Meter, log_interval
from replicax.train.run.stopping import Interrupt, is_any_open
from replicax.train.run.summary import Fit, derived, describe, doubts, plain_fields, run_summary
from replicax.train.run.to_its_end import to_its_end

_MOST_5, _EVERY_TEN_MINUTES = Guard(), Saving()
_ALIKE = "parallel", "data"
"""Sections of the configuration that are equal in all islands."""
_OF_ENTERED = {"_stopping", "_storage", "_interrupt", "_ledger", "result"}


class Run(Resuming):
    """A training run: yields batches, starting at exactly the next one, and steps on them.

    With a `run_dir` it saves checkpoints, and the same program, run again after any stop, resumes
    from the last good checkpoint with the same results; the saved state then replaces `state`.
    In a multi-process job all processes make the same calls; process 0 prints and records.

    Examples:
        >>> with rx.Run(dp, state, source, batch_size=256, epochs=10, run_dir="runs/x") as run:
        ...     for batch in run:
        ...         metrics = run.step(batch)
        >>> model = dp.model(run.state)

    Args:
        dp: the `DataParallel` to step with.
        state: from `dp.init`; consumed if `dp` donates. To resume, a consumed one will do.
        source: as for `dp.feed`. A loader, its sampler or its data set with a method `set_epoch` is
            called with the number of each epoch, from 0, so that a run that resumes in the middle
            of an epoch reads the rest of it.
        batch_size: rows of a global batch.
        epochs: passes over the source. Pass this or `steps`.
        steps: number of updates.
        eval_source: evaluated in full after every epoch and after the last step: a source, or an
            `rx.Evaluation`.
        shuffle: whether to reshuffle every epoch; by default, unlike `dp.feed`, if the source can.
        seed: seed of the shuffle.
        prefetch: as for `dp.feed`; 0 if the next batch depends on what the loop does with a step,
            as it is of a generator by default.
        steps_per_call: steps of each dispatched program, for models whose step takes a millisecond
            or less; the run yields so many batches as one, `step` returns metrics `[steps]`, and a
            stop, a checkpoint or an evaluation comes between two calls. With None, as in `rx.fit`,
            the run chooses, and says so; 1 if a hook looks at each step.
        log_every: steps between two train records; by default 50, fewer in runs of under 1,000.
        hooks: observers of the run, in addition to `records.jsonl`, `curves.png` and the progress
            display; see `rx.Hook`.
        guard: when to skip a step, and how many skipped steps stop the run.
        run_dir: a folder for `config.json`, `records.jsonl`, `curves.png`, and the checkpoints, or
            its URL in an object store, as in `gs://bucket/runs/x`; None to write none of these.
        saving: when to save a checkpoint, and which ones to keep.
        accept_changes: whether to resume in a `run_dir` that has a different configuration.
        config: additional entries of `config.json`, next to the derived ones.
        progress: whether to print the derived values, a live line, and a closing summary.
        interrupt: handles SIGINT, SIGTERM, SIGHUP and SIGQUIT. By default a new one, of SIGINT only
            if nothing is saved; once all is saved and closed, the run then raises
            `KeyboardInterrupt` after Ctrl-C, else `SystemExit` with code 75, each with the `Fit` as
            its `result`. With your own `rx.Interrupt`, or within another run, it returns: read
            `result.interrupted`.

    Raises:
        ConfigError: invalid arguments.
        AgreementError: the arguments differ between processes.
        LossError: see `DataParallel.step`.
        DivergedError: the loss, or a parameter at the end, is no longer finite.
        CheckpointError: the state cannot be saved, or a checkpoint cannot be read.
        RunInUseError: another process is already writing to this run.
    """

    @typed_but("state")
    def __init__(
        self,
        dp: DataParallel,
        state: TrainState,
        source: Any,
        *,
        batch_size: Int32Count | None = None,
        epochs: Count | None = None,
        steps: Count | None = None,
        eval_source: Any = None,
        shuffle: bool | None = None,
        seed: Seed = 0,
        prefetch: Natural | None = None,
        steps_per_call: Count | None = 1,
        log_every: Count | None = None,
        hooks: Sequence[Hook] = (),
        guard: Guard = _MOST_5,
        run_dir: str | Path | None = None,
        saving: Saving = _EVERY_TEN_MINUTES,
        accept_changes: bool = False,
        config: dict[str, Any] | None = None,
        progress: bool = True,
        interrupt: Interrupt | None = None,
    ) -> None:
        super().__init__()
        check_is_state(state)
        if (epochs is None) == (steps is None):
            raise ConfigError(
                f"epochs={epochs} and steps={steps}; a run has exactly one length: pass one of them"
            )
        if shuffle is None:
            shuffle = can_shuffle(source)
        self.source = as_source(source, batch_size, dp.job, shuffle=shuffle, seed=seed)
        if (epochs or 0) > 1 and not self.source.can_repeat:
            raise ConfigError(f"epochs={epochs} of a source {ONLY_ONCE}, or steps=...")
        plan = as_evaluation(eval_source, source)
        told: dict[str, Any] = {"epochs": epochs, "steps": steps, "batch_size": batch_size}
        told |= {"log_every": log_every, "steps_per_call": steps_per_call} | plain_fields(
            guard=guard, saving=saving, evaluation=plan
        )
        self._agreed = {**told, **plain_config(config or {})}
        dp.job.agree("the run", self._agreed)
        self._members = Members(
            dp.job, lambda: self._interrupt.wanted, lambda: is_complete(self._run_dir, self.total)
        )
        self._own_mesh = dp.configuration.in_own_mesh
        with self._own_mesh():
            state = at_start(dp, state, guard)
        self._file, self._first = RecordsFile(), dp.feed(self.source, prefetch=prefetch)
        self.epochs, self.total = epochs, steps
        if epochs is not None and self._first.padding is not None:
            self.total = epochs * len(self._first)
        self._display = open_progress(progress and self._members.speaks, self.total)
        ours = [self._display, *([] if run_dir is None else [Curves()])]
        self.hooks = Hooks([self._file, *hooks, *ours], self.alarm, [self._file, *ours])
        self.dp, self.state = guarded(dp, state, self.hooks.wraps), state
        self._evaluator = None
        if plan is not None:
            self._evaluator = Evaluator(plan, self.dp, state, batch_size, self._gives_up, self.say)
            steps_of_epoch = self.source.batches or steps or 1
            self._evaluator.check_passes(epochs or -(-(steps or 1) // steps_of_epoch))
        self._run_state = RunState(
            self.source,
            dp.job,
            self.hooks,
            Meter(log_every or log_interval(self.total)),
            BadSteps(guard.max_bad_steps, dp.job, judged(dp, state)),
            self._evaluator,
            RereadCheck(dp.job, self.say, self.alarm, accept=accept_changes),
        )
        self.records = self._run_state.records
        self.config = dict(config or {})
        self._steps_per_call = steps_per_call
        self._run_dir = None if run_dir is None else place(run_dir)
        self._saving, self._seed, self._accept, self._plan = saving, seed, accept_changes, plan
        self.resumable = run_dir is not None and saving.wanted
        self._given_interrupt, self._open = interrupt, contextlib.ExitStack()

    def __iter__(self) -> Iterator[FeedItem]:
        """Yield batches, starting at exactly the next one; evaluate and save between them."""
        batches = self._stream = self._batches()
        while True:
            with self._own_mesh():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def step(self, batch: FeedItem) -> dict[str, Any]:
        _ = self._stopping  # a run that is not entered has none, and says so
        with self._own_mesh():
            return super().step(batch)

    def __enter__(self) -> Self:
        with self._own_mesh(), contextlib.ExitStack() as stack:
            stack.callback(self._display.close)
            self._interrupt = self._given_interrupt or Interrupt(terminate=self.resumable)
            if not self._interrupt.is_open:
                stack.enter_context(self._interrupt)
            self.hooks("before_run", self)
            self.config |= derived(self.dp, self._first, self._agreed)
            if self._evaluator is not None:
                self.config["data"]["evaluation"] = self._evaluator.fingerprint()
            for line in describe(self.dp, self.state, self._first):
                self.say(line)
            self._calls, lines = call_sizes(self, self._steps_per_call, self._looks())
            for line in lines:
                self.say(line)
            for line in doubts(self.dp, self.total) if self._members.speaks else ():
                self.alarm(line)
            # Called again, as in a notebook, with a state that is used up, it can resume.
            self._donated = was_donated(self.state) and self._is_known()
            self._never_finite = set() if self._donated else params_not_finite(self.state)
            agreed = {"run": self._agreed, **{part: self.config[part] for part in _ALIKE}}
            if self._run_dir is not None and (rows := some_rows(self.source)) is not None:
                size = self.source.batch_size  # traced before other islands wait for this one
                self.config["program"] = program_fingerprint(self.dp, self.state, rows, size)
            if self.resumable:
                check_storable(self.state)  # imports Orbax, which takes a while, too
            self._members.enter(plain_config(agreed), self.dp, self.state, self._first)
            self._take_folder(stack)
            stack.enter_context(self.dp.job.in_flight.followed())
            clock = self._saving.clock_seconds if self._resumable else None
            between = self.dp.configuration.between
            self._stopping = self._members.stopping(
                self._interrupt, clock, lambda: between.is_calm(self.place.step)
            )
            self._resume()
            self._meet_members(begins=True)
            self.dp.job.in_flight.forget()  # notes of a run that ended with an error
            self._since = time.perf_counter(), self.place.step, self.rows
            stack.push(self._conclude)
            stack.push(self._end_hooks)
            self.hooks("start", self)
            self._follow(0)
            if self._members.given is None or self._members.given.begins:
                self._stopping.vote(now=True)
            self._open = stack.pop_all()
        return self

    if not TYPE_CHECKING:  # a type checker would then take any attribute

        def __getattr__(self, name: str) -> Any:
            """Raise `StateError` if the attribute is set once the run is entered."""
            if name in _OF_ENTERED and "_stopping" not in vars(self):
                raise StateError(
                    "this rx.Run is used outside of its block, in which it opens its files and "
                    "saves its end: write `with rx.Run(...) as run:`"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __exit__(self, *raised: Any) -> None:
        with self._own_mesh():
            self._exit(*raised)

    def _exit(self, *raised: Any) -> None:
        if raised[1] is not None:  # passed to every open context: the run did not complete
            if self._stream is not None:
                self._open.callback(self._stream.close)
            if isinstance(raised[1], IslandLeftError) and raised[1].is_sound:
                self._save_what_is_left()
            self._open.__exit__(*raised)
            if isinstance(raised[1], RunInUseError) and self._members.has_islands:
                self._members.leave(str(raised[1]))  # as one that was frozen: it may come back
            return
        with self._open:
            if self._stream is not None:
                self._stream.close()
            self._finish()
        # Around this run may be another one, which knows of the signal and saves before it raises.
        if self.result.interrupted and self._given_interrupt is None and not is_any_open():
            ctrl_c = self._stopping.signal == signal.SIGINT
            raise interrupted(self.result) if ctrl_c else Terminated(self.result)

    def _save_what_is_left(self) -> None:
        """Save the state of an island that had to leave, if no other has taken over the folder."""
        if self._storage is not None and self._resumable and not self._storage.follows:
            with contextlib.suppress(ReplicaxError):
                if not self._storage.all_still_write():
                    return
                self._follow(0)
                self._storage.finish(self.state, *self._run_state.save_state())

    def _looks(self) -> dict[str, int]:
        """Return the steps between two after which the run looks at the state, by who does."""
        every = {
            "rx.Evaluation": self._plan and self._plan.every_steps,
            "rx.Saving": self.resumable and self._saving.every,
            "prefetch=0": self._first.prefetch == 0,
        }
        return self.hooks.intervals | {name: int(steps) for name, steps in every.items() if steps}

    def _end_hooks(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        self.error = error
        self.hooks("end", self)

    def _is_known(self) -> bool:
        """Whether an earlier start left a run from which this one can resume."""
        if self._run_dir is None or not self.resumable:
            return False
        with writing(self._run_dir):
            return exists(self._run_dir / CONFIG)

    def _take_folder(self, stack: contextlib.ExitStack) -> None:
        self._storage, self._ledger = None, Ledger(None)
        if self._run_dir is None:
            return
        self._storage = storage = Storage(
            self._run_dir,
            self.config,
            self._saving,
            self.dp.job,
            accept_changes=self._accept,
            state=self.state,
            seed=self._seed,
            never_finite=self._never_finite,
            say=self.say,
            alarm=self.alarm,
            pinned=lambda: self.hooks.pinned,
            follows=self._members.follows,
            island=self._members.island,
        )
        if self._members.has_islands:
            self._members.arbitrate(lambda gone: storage.goes_on(self.place.step, all_gone=gone))
            if storage.folder is not None:
                storage.folder.write_while(storage.still_writes)
        stack.callback(self._storage.close)
        self._file.folder, self._ledger = self._storage.folder, self._storage.ledger
        self._ledger.hooks = self.hooks.seconds

    def _finish(self) -> None:
        """Save the final state, whether all steps are done or the loop was left early."""
        if not self._ended:  # left early
            self._settle(closing=not self._resumable)
        if wrong := sorted(params_not_finite(self.state) - self._never_finite):
            raise DivergedError(
                f"{wrong[0]} is not finite after step {self.place.step:,}, and was when the run "
                "began: lower the learning rate, or clip the gradient"
            )
        if self._storage is not None and self._resumable:
            self.hooks("saving", self)
            while True:
                self._storage.finish(self.state, *self._run_state.save_state())
                if self._members.all_saved(not self._storage.follows):
                    break
                self._meet_members(must=True)
        storage, job = self._storage, self.dp.job
        ends_here = not self._begun and not self._stopping.wanted
        if storage is not None and not storage.knows_program and ends_here:
            repeats = job.gather("whether a source can be read again", self.source.can_repeat)
            rows = next(self.source.epoch(0))[0] if all(repeats) else None
            if rows is not None:  # not known from a batch, as no steps were left to train
                program = program_fingerprint(self.dp, self.state, rows, traced=storage.traced)
                storage.check_program(program)
        self._interrupt.let_go()
        self.dp.job.rest()

    def _conclude(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        """Print how the run ended, and store that in `result`; do nothing if it failed."""
        if error is not None:
            return
        started, step, rows = self._since
        self._ledger.close(kept=True)
        self.result = Fit(
            state=self.state,
            records=self.records,
            steps=self.place.step - step,
            rows=self.rows - rows,
            seconds=time.perf_counter() - started,
            interrupted=self._stopping.wanted,
            step=self.place.step,
            saved=self._resumable,
            stopped=self._stopping.why,
            failed_hooks=tuple(self.hooks.failed),
            goodput=self._ledger.summary() if self.folder is not None else None,
        )
        lines = [*run_summary(self.result, self.total), *self.hooks.summary(self.place.step)]
        if self.result.goodput is not None and self.result.saved:
            lines += self.result.goodput.lines()
        if self.dp.mode.bitwise:
            lines.append(f"bits   sha256 of the weights {sha256(self.state.params)[:16]}")
        for line in lines:
            self.say(line)


fit = to_its_end(Run, steps_per_call=None)

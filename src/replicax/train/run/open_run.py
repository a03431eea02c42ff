"""A run that was entered: what it holds open and in which order it came, and how it ends."""

import contextlib
import signal
import time
from pathlib import Path
from typing import Any

import jax

from replicax.core.ground.train_state import TrainState, check_unused, was_donated
from replicax.errors import (
    DivergedError,
    IslandLeftError,
    ReplicaxError,
    RunInUseError,
    Terminated,
    interrupted,
)
from replicax.train.checkpoints.arrays import array_entries, check_storable, params_not_finite
from replicax.train.files.fingerprint import sha256
from replicax.train.files.records import plain_config
from replicax.train.folder.followed_folder import FollowedFolder
from replicax.train.folder.goodput import Ledger
from replicax.train.folder.program_fingerprint import program_fingerprint, some_rows
from replicax.train.folder.read_again import HOW_TO_SEED
from replicax.train.folder.storage import FolderOptions, Storage
from replicax.train.folder.written_folder import WrittenFolder
from replicax.train.hooks.call_sizes import CallSizes, call_sizes
from replicax.train.hooks.hook import Running
from replicax.train.run.finished_steps import FinishedSteps
from replicax.train.run.host_memory import Garbage
from replicax.train.run.run_parts import RunParts
from replicax.train.run.run_state import expected_steps
from replicax.train.run.stopping import Stopping, is_any_open
from replicax.train.run.stragglers import StepTimes
from replicax.train.run.summary import Fit, derived, describe, doubts, run_summary

_ALIKE = "parallel", "data"
"""Sections of the configuration that are equal in all islands."""


class OpenRun:
    """All that a run opens when it is entered, and closes, the last first, when it is left.

    It is at the saved position once it is made; `begin` then calls the hooks, which may use all.
    """

    result: Fit
    """Set once the run has ended without an error."""

    def __init__(self, parts: RunParts, run: Running, stack: contextlib.ExitStack) -> None:
        self.parts = parts
        now, dp, members, saving = parts.now, parts.dp, parts.members, parts.settings.saving
        # Closed last, as whatever closes before it may print.
        stack.callback(parts.display.close)
        # Signals next: all that follows takes long, and one that comes meanwhile counts.
        if not parts.interrupt.is_open:
            stack.enter_context(parts.interrupt)
        # Hooks refuse what cannot work before anything is read, written or compiled.
        parts.hooks("before_run")
        # Completes the configuration, which the islands compare and the folder keeps.
        self.calls = self._described(run)
        # Traces before the islands meet: others would wait for this one.
        # A state that is used up, as in a notebook that calls again, will do to resume.
        donated = was_donated(now.state) and parts.settings.is_known()
        self._never_finite = set() if donated else params_not_finite(now.state)
        agreed = self._agreed()
        if parts.settings.resumable:
            check_storable(now.state)
        members.enter(agreed, dp, now.state, parts.feed)
        # The folder after they have met, as only then it is known which of them writes it.
        self.storage = self._opened_storage(stack)
        # Steps after the folder, which is thus closed when none is in flight any more.
        stack.enter_context(dp.job.in_flight.followed())
        self.steps = FinishedSteps(parts, lambda: self.ledger)
        self.garbage, self.times = Garbage(dp.job.processes), StepTimes(dp.job.in_flight, parts.say)
        stack.enter_context(self.garbage.restored())
        # Votes before the state: a run that another island gives brings some.
        self.stopping: Stopping = members.stopping(
            parts.interrupt,
            saving.clock_seconds if parts.settings.resumable else None,
            lambda: dp.configuration.between.is_boundary(now.place.step),
            self.times,
        )
        # The state last: a run that is refused above leaves the one it was given as it is.
        self._resume(donated)

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Call the hooks, which may ask for anything from here on; then keep all open."""
        parts, now = self.parts, self.parts.now
        # Newcomers get the state before a hook may change it in this island alone.
        self.meet_members(begins=True)
        now.job.in_flight.forget()  # notes of a run that ended with an error
        # Counted from here: what earlier starts did is not of this one.
        self._since = time.perf_counter(), now.place.step, now.rows
        # In the end the hooks come first, then the summary, which tells of those that failed.
        stack.push(self._conclude)
        stack.push(self._end_hooks)
        parts.hooks("start")
        self.steps.follow(0)  # keeps the place that a hook noted in `start` as a good one
        # What hooks asked for in `start`; in a run that is under way, its next vote decides.
        if parts.members.given is None or parts.members.given.begins:
            self.stopping.vote(now=True)
        self.held = stack.pop_all()  # last: an error up to here closes all of it at once

    @property
    def ledger(self) -> Ledger:
        return self.storage.ledger  # another once this island has taken over the folder

    @property
    def folder(self) -> Path | None:
        return self.storage.path if self.parts.members.is_main else None

    def _described(self, run: Running) -> CallSizes:
        """Print the derived values of the run, and put them in its configuration."""
        parts, settings = self.parts, self.parts.settings
        parts.config.update(derived(parts.dp, parts.feed, settings.agreed()))
        if parts.evaluator is not None:
            parts.config["data"]["evaluation"] = parts.evaluator.fingerprint()
        for line in describe(parts.dp, parts.now.state, parts.feed):
            parts.say(line)
        looks = settings.looks(parts.hooks.intervals)
        calls, lines = call_sizes(run, settings.steps_per_call, looks)
        for line in lines:
            parts.say(line)
        found = doubts(parts.dp, parts.now.total)
        if settings.resumable and parts.now.source.draws_order:
            found.append(
                f"the loader draws its order: no start can go on within an epoch; {HOW_TO_SEED}"
            )
        for line in found if parts.members.speaks else ():
            parts.alarm(line)
        return calls

    def _agreed(self) -> dict[str, Any]:
        """Return what must be equal in all islands, and trace the program for the folder."""
        settings, source = self.parts.settings, self.parts.now.source
        config = self.parts.config
        agreed = {"run": settings.agreed(), **{part: config[part] for part in _ALIKE}}
        if settings.run_dir is not None and (rows := some_rows(source)) is not None:
            state, size = self.parts.now.state, source.batch_size
            config["program"] = program_fingerprint(self.parts.dp, state, rows, size)
        return plain_config(agreed)

    def _opened_storage(self, stack: contextlib.ExitStack) -> Storage:
        parts, settings, now = self.parts, self.parts.settings, self.parts.now
        if settings.run_dir is None:
            return Storage()
        island, has_own = parts.members.island, bool(jax.tree.leaves(now.state.islands))
        options = FolderOptions(
            path=settings.run_dir,
            config=plain_config(parts.config),
            saving=settings.saving,
            job=now.job,
            arrays=array_entries(now.state) if settings.resumable else {},
            seed=settings.seed,
            say=parts.say,
            alarm=parts.alarm,
            accept_changes=settings.accept_changes,
            never_finite=self._never_finite,
            pinned=lambda: parts.hooks.pinned,
            island=island,
            has_own=settings.resumable and island is not None and has_own,
        )
        kind = FollowedFolder if parts.members.follows else WrittenFolder
        storage: Storage = kind(options)
        storage.begin()
        stack.callback(lambda: self.storage.close())
        parts.members.arbitrate(lambda gone: self.storage.goes_on(now.place.step, terminated=gone))
        parts.file.folder, storage.ledger.hooks = storage.folder, parts.hooks.seconds
        return storage

    def _resume(self, donated: bool) -> None:
        """Move to the saved or the given position, and replace the state with that one."""
        now, given = self.parts.now, self.parts.members.given
        if given is not None:
            now.receive(given)
            self.stopping.load_state(given.votes)
        elif self.storage.found is None:
            check_unused(now.state)
        else:
            now.restore(self.storage, donate=self.parts.dp.donate)
            if donated:
                self._never_finite |= params_not_finite(now.state)
        islands = jax.tree.leaves(now.state.islands) if self.parts.members.has_islands else ()
        if islands and now.place.step:
            now.state = self._own_state(restored=given is None or given.begins)

    def _own_state(self, *, restored: bool) -> TrainState:
        """Return the state with what this island has for itself, or as one that joins."""
        now, checkpoints = self.parts.now, self.storage.own
        state, step = now.state, now.place.step
        saved = None if checkpoints is None else checkpoints.found(state, step, self.parts.alarm)
        if saved is not None:
            return saved
        if restored:
            self.parts.alarm(
                f"this island saved nothing of its own at step {step:,}, and takes the optimizer "
                "state of another: results differ from those of a run that was not stopped"
            )
        dp = self.parts.dp
        return dp.configuration.between.joined(dp.program(state).step, state)

    def meet_members(self, *, begins: bool = False, must: bool = False) -> None:
        """Record which islands joined and left, write if the one that did is gone, and give."""
        parts, members, now = self.parts, self.parts.members, self.parts.now
        if self.stopping.leaves is not None:
            members.leave(self.stopping.leaves)
        if self.storage.follows and not members.follows:
            self.storage = self.storage.taken_over(now.records, must=must)
            if not self.storage.follows and members.is_main:
                parts.file.folder = self.storage.folder
                parts.hooks("take_over")
        self.ledger.move("productive", "islands", members.delayed_seconds())
        for record, line in members.changes(now.place.step, now.place.epoch):
            parts.keep(record)
            if members.is_main:
                parts.alarm(line)
        if members.newcomers:
            self.steps.follow(0)
            saved, votes = now.save_state(), self.stopping.save_state()
            members.give(now.state, saved, now.records, votes, begins=begins)

    def finish(self) -> None:
        """Save the final state, whether all steps are done or the loop was left early."""
        parts, now = self.parts, self.parts.now
        # Before it is saved, so that the newest checkpoint stays a good one.
        if wrong := sorted(params_not_finite(now.state) - self._never_finite):
            raise DivergedError(
                f"{wrong[0]} is not finite after step {now.place.step:,}, and was when the run "
                "began: lower the learning rate, or clip the gradient"
            )
        if parts.settings.resumable:
            parts.hooks("saving")
            while True:
                self.storage.finish(now.state, *now.save_state())
                if parts.members.all_saved(not self.storage.follows):
                    break
                self.meet_members(must=True)  # the island that writes is gone: another has to
        storage = self.storage
        if not (storage.knows_program or now.begun or self.stopping.interrupted):
            repeats = now.job.gather("whether a source can be read again", now.source.can_repeat)
            rows = next(now.source.epoch(0))[0] if all(repeats) else None
            if rows is not None:  # not known from a batch, as no steps were left to train
                program = program_fingerprint(parts.dp, now.state, rows, traced=storage.traced)
                storage.check_program(program)
        parts.interrupt.let_go()  # all is saved: a signal may end the process at once again
        now.job.rest()  # closing may take long, and is no stall

    def fail(self, *raised: Any) -> None:
        """Close what is open, and tell it of the error: the run is not complete."""
        members, error = self.parts.members, raised[1]
        # Before the folder is closed, which releases its lease.
        if isinstance(error, IslandLeftError) and error.is_sound:
            self._save_what_is_left()
        self.held.__exit__(*raised)
        if isinstance(error, RunInUseError) and members.has_islands:
            members.leave(str(error))  # as one that was frozen: it may come back

    def _save_what_is_left(self) -> None:
        """Save the state of an island that had to leave, if no other has taken over the folder."""
        now, storage = self.parts.now, self.storage
        if self.parts.settings.resumable and not storage.follows:
            with contextlib.suppress(ReplicaxError):
                if storage.all_still_write():
                    self.steps.follow(0)
                    storage.finish(now.state, *now.save_state())

    def _end_hooks(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        self.parts.now.error = error
        self.parts.hooks("end")

    def _conclude(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        """Print how the run ended, and store that in `result`; do nothing if it failed."""
        if error is not None:
            return
        parts, now = self.parts, self.parts.now
        started, step, rows = self._since
        self.ledger.close(kept=True)  # the storage would count what is not saved as lost
        self.result = result = Fit(
            state=now.state,
            records=now.records,
            steps=now.place.step - step,
            rows=now.rows - rows,
            seconds=time.perf_counter() - started,
            interrupted=self.stopping.interrupted,
            step=now.place.step,
            saved=parts.settings.resumable,
            stopped=self.stopping.hook_reason,
            failed_hooks=tuple(parts.hooks.failed),
            goodput=self.ledger.summary() if self.folder is not None else None,
        )
        lines = [
            *run_summary(result, expected_steps(now.source, now.epochs, now.total)),
            *parts.hooks.summary(now.place.step),
        ]
        if result.goodput is not None and result.saved:
            lines += result.goodput.lines()
        if parts.dp.mode.bitwise:
            lines.append(f"bits   sha256 of the weights {sha256(now.state.params)[:16]}")
        for line in lines:
            parts.say(line)

    def raise_if_interrupted(self) -> None:
        """Raise what ends a program after a signal, unless another is to decide that.

        Around this run may be another one, which knows of the signal and saves before it raises.
        """
        given = self.parts.settings.interrupt
        if self.result.interrupted and given is None and not is_any_open():
            ctrl_c = self.stopping.signal == signal.SIGINT
            raise interrupted(self.result) if ctrl_c else Terminated(self.result)

"""`Run`, a training run as an object, and `fit`, a whole run in one call."""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, ParamSpec, Self

from replicax.core.data.share import FeedItem
from replicax.core.data.sources import can_shuffle
from replicax.core.data_parallel import DataParallel
from replicax.core.first_step.argument_checks import check_is_state
from replicax.core.ground.train_state import ModelT, TrainState
from replicax.errors import ConfigError, StateError
from replicax.text.arguments import (
    Count,
    Int32Count,
    Natural,
    Seed,
    bind,
    typed_but,
    with_signature,
)
from replicax.train.dispatched import RunPosition
from replicax.train.files.places import place
from replicax.train.files.records import Record
from replicax.train.folder.saving import Saving
from replicax.train.guarded import Guard
from replicax.train.hooks.hook import Hook, Running
from replicax.train.run.evaluator import as_evaluation
from replicax.train.run.loop import Loop
from replicax.train.run.open_run import OpenRun
from replicax.train.run.run_parts import assemble
from replicax.train.run.settings import Settings
from replicax.train.run.stopping import Interrupt
from replicax.train.run.summary import Fit

_MOST_5, _EVERY_TEN_MINUTES = Guard(), Saving()
_Arguments = ParamSpec("_Arguments")


class Run(Running, Generic[ModelT]):
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
            its `result`. With an `rx.types.Interrupt`, or within another run, it returns: read
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
        state: TrainState[ModelT],
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
        check_is_state(state)
        settings = Settings(
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            evaluation=as_evaluation(eval_source, source),
            shuffle=can_shuffle(source) if shuffle is None else shuffle,
            seed=seed,
            prefetch=prefetch,
            steps_per_call=steps_per_call,
            log_every=log_every,
            guard=guard,
            run_dir=None if run_dir is None else place(run_dir),
            saving=saving,
            accept_changes=accept_changes,
            config=config or {},
            progress=progress,
            interrupt=interrupt,
        )
        self._parts = parts = assemble(self, dp, state, source, hooks, settings)
        self._now, self._own_mesh = parts.now, dp.configuration.in_own_mesh
        self._entered: Loop | None = None
        self.dp, self.source, self.hooks = parts.dp, parts.now.source, parts.hooks
        self.records, self.config, self.epochs = parts.now.records, parts.config, epochs
        self.resumable = settings.resumable

    def __enter__(self) -> Self:
        with self._own_mesh(), contextlib.ExitStack() as stack:
            run = OpenRun(self._parts, self, stack)
            self._entered = Loop(run)  # before the hooks start, which ask it for the run
            run.begin(stack)
        return self

    def __iter__(self) -> Iterator[FeedItem]:
        """Yield batches, starting at exactly the next one; evaluate and save between them."""
        batches = self._loop.batches()
        while True:
            with self._own_mesh():
                batch = next(batches, None)
            if batch is None:
                return
            yield batch

    def step(self, batch: FeedItem) -> dict[str, Any]:
        """Do the step on the batch yielded last, or the steps, and return its metrics.

        They are as those of `DataParallel.step`, or `steps`: reading one waits for the step.

        Raises:
            StateError: the batch is another one, or was stepped on already.
            ReplicaxError: as in `DataParallel.step`, and errors of hooks.
        """
        loop = self._loop
        with self._own_mesh():
            return loop.step(batch)

    def __exit__(self, *raised: Any) -> None:
        loop, run = self._loop, self._loop.run
        with self._own_mesh():
            if raised[1] is not None:
                # The batches first: threads may still read them when the rest closes.
                run.held.callback(loop.close)
                run.fail(*raised)
                return
            with run.held:  # closes all the rest, what was opened last first
                loop.leave()
                run.finish()
        run.raise_if_interrupted()  # once all is saved and closed

    @property
    def _loop(self) -> Loop:
        if self._entered is None:
            raise StateError(
                "this rx.Run is used outside of its block, in which it opens its files and "
                "saves its end: write `with rx.Run(...) as run:`"
            )
        return self._entered

    @property
    def result(self) -> Fit[ModelT]:
        """How the run ended, once its block is left."""
        return self._loop.run.result

    @property
    def state(self) -> TrainState[ModelT]:
        """The state after the newest step; the next may donate it. A hook may replace it."""
        return self._now.state

    @state.setter
    def state(self, state: TrainState[ModelT]) -> None:
        self._now.state = state

    @property
    def total(self) -> int | None:  # type: ignore[override]
        """Total steps of the run, if known."""
        return self._now.total

    @property
    def error(self) -> BaseException | None:  # type: ignore[override]
        """The exception that ended the run, in `Hook.end`."""
        return self._now.error

    @property
    def place(self) -> RunPosition:
        return self._now.place

    @property
    def rows(self) -> int:
        """Rows trained on in the whole run."""
        return self._now.rows

    @property
    def folder(self) -> Path | None:
        return self._loop.run.folder

    @property
    def is_main(self) -> bool:
        return self._parts.members.is_main

    def evaluation_metrics(self) -> Collection[str] | None:
        evaluator = self._parts.evaluator
        return () if evaluator is None else evaluator.metrics(self.state)

    def say(self, line: str) -> None:
        self._parts.say(line)

    def alarm(self, line: str) -> None:
        self._parts.alarm(line)

    def keep(self, record: Record) -> None:
        self._parts.keep(record)

    def stop(self, why: str) -> None:
        self._loop.run.stopping.stop(why)

    def save(self) -> None:
        """Request a checkpoint.

        Raises:
            ConfigError: the run does not save checkpoints.
        """
        stopping = self._loop.run.stopping
        if not self.resumable:
            raise ConfigError(
                "a checkpoint was requested, but the run does not save any; pass a run_dir, and a "
                "Saving with steps or minutes"
            )
        stopping.save()

    def evaluate(self) -> None:
        self._loop.run.stopping.evaluate()

    def wait(self) -> None:
        self._loop.waits = True

    def note_good(self) -> None:
        self._loop.run.steps.note_good()

    def go_back(
        self, state: TrainState, place: RunPosition, why: str, metrics: dict[str, float]
    ) -> None:
        self._loop.run.steps.go_back(state, place, why, metrics)


def _to_its_end(
    run: Callable[_Arguments, Run[ModelT]],
) -> Callable[_Arguments, Fit[ModelT]]:
    """Return a function with the arguments of `Run` that steps on all batches of the run."""
    chosen: dict[str, Any] = {"steps_per_call": None}  # by the run
    signature = inspect.signature(run)
    parameters = [
        parameter.replace(default=chosen.get(parameter.name, parameter.default))
        for parameter in signature.parameters.values()
    ]
    signature = signature.replace(parameters=parameters, return_annotation=Fit[ModelT])

    def fit(*arguments: _Arguments.args, **settings: _Arguments.kwargs) -> Fit[ModelT]:
        """Train for a number of epochs or steps: an `rx.Run` from start to end.

        Takes the arguments of `rx.Run`, and raises the same errors.

        Examples:
            >>> result = rx.fit(dp, state, source, batch_size=256, epochs=10, eval_source=held_out)
            >>> result.metrics["loss"], dp.model(result.state)
        """
        bind("fit", signature, arguments, settings)
        settings.update(chosen | settings)
        with run(*arguments, **settings) as running:
            for batch in running:
                running.step(batch)
        return running.result

    fit.__qualname__ = "fit"
    return with_signature(fit, signature)  # type: ignore[no-any-return]


fit = _to_its_end(Run)

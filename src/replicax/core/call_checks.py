"""The checks before a program first runs: the loss, the other processes, the memory."""

import contextlib
import dataclasses
import logging
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from replicax.core.config import Configuration
from replicax.core.data.batch import Batch
from replicax.core.data.feed import Feed
from replicax.core.data.rows import OpenedRows, opened
from replicax.core.data.share import Batches
from replicax.core.first_step import row_errors
from replicax.core.first_step.argument_checks import check_shapes, check_state, placed_as
from replicax.core.first_step.examiner import LossRun, of_loss
from replicax.core.first_step.loss_check import LossExamination
from replicax.core.first_step.memory_check import check_fits
from replicax.core.first_step.rank_rules import rank_rule
from replicax.core.first_step.row_trials import Division
from replicax.core.first_step.step_run import each_set, run_step
from replicax.core.ground.job import Job
from replicax.core.ground.leaves import PyTree, by_path, describe_leaves, is_here, shapes_by_path
from replicax.core.ground.train_state import Metrics, TrainState, check_outside_jit, check_unused
from replicax.core.placement.mesh import by_rows
from replicax.core.program import Program
from replicax.core.step.base import CompiledFunction
from replicax.core.step.loss import LOSS
from replicax.core.step.update import step_key
from replicax.errors import ConfigError, LossError, StateError

_COMPARED_EVERY = 256
"""Steps between two comparisons of parameters whose bits are promised."""
_ROWS = (
    "a batch, of which each must have all rows; its own go to dp.feed(rx.ProcessLocal(rows), ...)"
)
_traced = jax.disable_jit(False)  # an examination knows functions by the names that jax.jit keeps
_log = logging.getLogger("replicax")


@dataclasses.dataclass(frozen=True)
class Phase:
    """The step, or an evaluation, which is of a loss even if the step is custom."""

    name: str
    learns: bool
    """Whether it updates the state, by a gradient or in a custom step."""
    key: Callable[[TrainState], Any]
    """Returns the random key that a loss is given."""


TRAINING = Phase("the step", learns=True, key=step_key)
EVALUATION = Phase("the evaluation", learns=False, key=lambda _: None)


class CallChecks:
    """Runs the checks of one program, each only once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._abstract = program.abstract_state()
        self._examinations: dict[Any, list[LossExamination]] = {}
        """By phase and shapes of the batch; the first of its own rows, then each set."""
        self._traces: dict[Any, LossExamination] = {}
        """By phase, shapes and set; nothing may have been asked of them yet."""
        self._padding: dict[Any, row_errors.Broken | None] = {}
        self._shapes: Batch | None = None
        self._agreed: set[Any] = set()
        self._fits = False
        # Weak: a state that the caller lets go must free its arrays.
        self._latest: Callable[[], TrainState | None] = lambda: None
        self._finite = program.configuration.wrap_apply is not None  # a wrapper has its own check
        self._is_custom = program.configuration.step is not None  # never in a program that scores
        self._apart = _is_apart(program)

    def check(
        self, phase: Phase, function: CompiledFunction[Any], state: TrainState, batch: Batch
    ) -> Batch:
        """Check the state and the loss, and that all processes agree on `function`.

        Returns the batch to compute: without its padding, if the loss depends on padded rows and
        the others can be split evenly.
        """
        self.check_state(state, batch)
        if batch.sets and not self._is_custom:
            raise row_errors.sets_of_rows(phase.name)
        if phase.learns and self.program.rows_of_state not in (None, batch.size):
            raise row_errors.other_rows(self.program.rows_of_state, batch.size)
        examinations, given = self._examination(phase, state, batch), batch
        batch = self._padded_or_not(phase, examinations[0], state, batch)
        if batch is not given:  # without its padding it is another program
            self._examination(phase, state, batch)
        self._check_padded_sets(examinations, state, batch)
        configuration = self.program.configuration
        if _agrees(configuration.job) and (shapes := _shapes(phase, batch)) not in self._agreed:
            text = partial(function.text, state, batch)
            agree_on_program(configuration, phase.name, (state, batch), text)
            self._agreed.add(shapes)
        if (peers := configuration.job.peers) is not None:
            peers.compare("the batch", batch)
            if configuration.mode.bitwise and not int(state.step) % _COMPARED_EVERY:
                peers.compare("the parameters", state.params)
        return batch

    def checked_step(self, state: TrainState, batch: Batch) -> Batch:
        """Check a step as `check` does, and that it fits in memory; return the batch to compute."""
        batch = self.check(TRAINING, self.program.step, state, batch)
        self.check_memory(state, batch)
        return batch

    def taken(self, state: TrainState) -> TrainState:
        """Return a state of any `DataParallel` as this program takes it: placed by its layout."""
        return state if state is self._latest() else placed_as(state, self._abstract)

    def check_state(self, state: TrainState, batch: Batch) -> None:
        """Raise `StateError` if a step cannot take a state, or is inside a transformation."""
        check_outside_jit(batch.mask)
        if state is self._latest():
            check_unused(state.step)
        else:
            check_state(state, self._abstract)
            self._latest = weakref.ref(state)

    def is_traced(self, state: Any, batch: Any) -> bool:
        """Whether a step of these is to be a part of the caller's program."""
        given = [batch.mask if type(batch) is Batch else batch]
        if state is not self._latest():
            given.append(state)
        return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(given))

    def traced(self, state: TrainState, batch: Any) -> Batch:
        """Check a step that is traced into another program, and return its batch.

        Where the traces do not decide, the values of an earlier step outside of it have to.
        """
        check_shapes(state, self._abstract)
        if not isinstance(batch, Batch):
            padded = self.program.batches.traced(batch)
            examination = self._examination(TRAINING, state, padded)[0]
            return self._padded_or_not(TRAINING, examination, state, padded)
        if not self._examination(TRAINING, state, batch)[0].takes_padding:
            raise LossError(
                "a value of the loss or step depends on padded rows, and inside a transformation "
                "it is not known how many an rx.Batch has: pass its rows themselves, batch.data"
            )
        return batch

    def placed(self, data: PyTree) -> Batch:
        """Return rows that all processes have as a batch; raise `AgreementError` if they differ."""
        self._check_rows(data)
        return self.program.batches.placed(data)

    def placed_all(self, batches: Any) -> Batches:
        """Return the batches of several steps, as `placed` does one."""
        if not isinstance(batches, list) or not any(type(each) is Batch for each in batches):
            self._check_rows(batches)
        return self.program.batches.placed_all(batches)

    def _check_rows(self, data: PyTree) -> None:
        if isinstance(data, TrainState):
            raise StateError(
                "the batch is an rx.TrainState, which comes first: write dp.step(state, batch)"
            )
        job = self.program.configuration.job
        if job.processes > 1:
            rows = opened(data)
            every = [rows.data, *rows.sets]
            here = jax.tree.map(lambda leaf: leaf if is_here(leaf) else None, every)
            shapes = _ROWS, *((path, np.shape(leaf)) for path, leaf in by_path(here).items())
            if shapes not in self._agreed:
                job.agree(_ROWS, describe_leaves(OpenedRows(here).on_host(copy=False).data))
                self._agreed.add(shapes)

    def check_memory(self, state: TrainState, batch: Batch) -> None:
        """Raise `ConfigError` if the first step needs more memory than available."""
        if not self._fits and self.program.holds(state, batch):
            compiled = self.program.step.compiled(state, batch)
            check_fits(compiled, self.program.configuration.mesh, batch.size)
            self._fits = True

    def check_result(self, state: TrainState, metrics: Metrics) -> None:
        """Raise `LossError` if the first step's loss is not finite, waiting for it.

        `state`, returned by a step, need not be checked when it is passed in again.
        """
        self._latest = weakref.ref(state)
        if self._finite:
            return
        loss = float(np.ravel(metrics[LOSS])[0])
        if not math.isfinite(loss):
            raise LossError(
                f"the loss is {loss} in the first step; a run cannot recover from it: look at the "
                "batch and the initial parameters (jax_debug_nans finds the operation)"
            )
        self._finite = True

    @_traced
    def check_feed(self, feed: Feed) -> None:
        """Raise `LossError` if the traces show that the loss cannot be evaluated on `feed`."""
        padding = feed.padding
        if not padding or self._shapes is None or self.program.configuration.step is not None:
            return
        size, broken = feed.split.padded(feed.source.batch_size), []
        with contextlib.suppress(Exception):  # the user's loss, on other data than it is for
            examination = self._trace(EVALUATION, self._abstract, self._shapes)
            broken = examination.doubts(_real(size - padding))[0]
        if broken and (size - padding) % self._parts:
            raise row_errors.padded(broken[0], padding, size)

    def _examination(self, phase: Phase, state: TrainState, batch: Batch) -> list[LossExamination]:
        """Return what is known of batches of these shapes, checking the first."""
        shapes = _shapes(phase, batch)
        if shapes not in self._examinations:
            self._shapes = self._shapes or jax.eval_shape(lambda batch: batch, batch)
            self._examinations[shapes] = self._examined(phase, state, batch)
        return self._examinations[shapes]

    def _trace(self, phase: Phase, state: TrainState, batch: Batch) -> LossExamination:
        key = *_shapes(phase, batch), batch.number
        if key not in self._traces:
            self._traces[key] = examination_of(self.program, phase, state, batch)
        return self._traces[key]

    @_traced
    def _examined(self, phase: Phase, state: TrainState, batch: Batch) -> list[LossExamination]:
        """Check the loss; raise `LossError` if it needs all rows of a batch but sees only some."""
        return [self._examined_rows(phase, *given) for given in each_set(state, batch)]

    def _examined_rows(self, phase: Phase, state: TrainState, batch: Batch) -> LossExamination:
        examination, custom = self._trace(phase, state, batch), self._is_custom
        if phase.learns and not custom and not examination.moves:
            raise LossError(
                "the loss has a gradient of 0 for all parameters, so nothing would train; compute "
                "it from them in floats: without argmax, round, == or stop_gradient"
            )
        if examination.nonlinear:
            raise row_errors.nonlinear(examination.nonlinear)
        if phase.learns and not custom and not self._examinations:
            given = self.program.updater, self._abstract.params, examination.one.jaxpr
            if rule := rank_rule(*given):
                _log.warning(rule)
        self._check_out(rows=examination.returns_rows, merges=examination.merges)
        hands_on, bitwise = not (custom or self._apart), self.program.configuration.mode.bitwise
        for division, sees in self._divisions(batch.size):
            broken = examination.broken(division, state, batch, hands_on=hands_on)
            alike = custom and not division.within and not bitwise
            if alike and examination.from_key and not broken:
                broken = [row_errors.Broken(examination.from_key[0], output=True, why="key")]
            if self._apart and not broken and examination.gathers_draws:
                raise row_errors.drawn(sees)
            if broken and broken[0].output and not custom:
                raise row_errors.written(broken[0], sees)
            if broken:
                raise row_errors.mixes_rows(broken[0], sees, self._fix())
        return examination

    def _check_out(self, *, rows: bool, merges: bool) -> None:
        """Raise `ConfigError` if the step returns rows, or merges a metric, where it cannot."""
        configuration, why = self.program.configuration, ""
        what = "an rx.ByRow" if rows else "a metric that is no mean"
        if configuration.between.apart and (rows or not configuration.mode.bitwise):
            why = configuration.between.apart
        elif self.program.split_objective.per_replica:
            why = "stages, of which only the last has the rows"
        if why and (rows or merges):
            raise ConfigError(
                f"{what} among the metrics with {why}: use one job without stages, or dp.predict "
                "for results by row"
            )

    def _padded_or_not(
        self, phase: Phase, examination: LossExamination, state: TrainState, batch: Batch
    ) -> Batch:
        """Return `batch`, or its real rows if the loss depends on padded ones."""
        real, broken = _real_rows(batch), None
        padded = batch.size - real
        if not (padded or batch.feed_padding):
            return batch
        # The most that the feed will pad is asked for now, not when its last batch comes.
        for padding in sorted({padded, batch.feed_padding or padded} - {0}):
            key = *_shapes(phase, batch), padding
            if key not in self._padding:
                self._padding[key] = self._depends_on_padding(examination, padding, state, batch)
            broken = self._padding[key] if padding == padded else broken
        if broken is None:
            return batch
        where = by_rows(self.program.mesh)
        short = batch.map_rows(lambda leaf: jax.device_put(leaf[:real], where))
        return dataclasses.replace(short, rows=real, feed_padding=None)

    @_traced
    def _depends_on_padding(
        self, examination: LossExamination, padding: int, state: TrainState, batch: Batch
    ) -> row_errors.Broken | None:
        """Return what depends on padding; raise `LossError` if the rest cannot be split evenly."""
        real = batch.size - padding
        broken = examination.broken(_real(real), *next(each_set(state, batch)))
        if not broken:
            return None
        several = self.program.configuration.job.processes > 1
        keeps = self.program.rows_of_state is not None
        if broken[0].raised or real % self._parts or several or keeps:
            raise row_errors.padded(broken[0], padding, batch.size)
        fix = "; values by row can be padded" if broken[0].scalar else ""
        _log.warning(
            f"{broken[0].name} depends on padded rows: batches of {real} rows are computed without "
            f"padding, by another program{fix}"
        )
        return broken[0]

    @_traced
    def _check_padded_sets(
        self, examinations: list[LossExamination], state: TrainState, batch: Batch
    ) -> None:
        """Raise `LossError` if a value depends on padded rows of a set."""
        if not batch.sets:
            return
        for examination, given in zip(examinations, each_set(state, batch), strict=True):
            rows, real = given[1], _real_rows(given[1])
            key = *_shapes(TRAINING, batch), rows.number, real
            if rows.number and real < rows.size and key not in self._padding:
                if broken := examination.broken(_real(real), *given):
                    raise row_errors.padded(broken[0], rows.size - real, rows.size)
                self._padding[key] = None

    @property
    def _parts(self) -> int:
        return self.program.split.replicas * self.program.split.micro_batches

    def _divisions(self, rows: int) -> list[tuple[Division, str]]:
        """Return which rows are computed without the others, and what computes them."""
        configuration, split = self.program.configuration, self.program.split
        mode, micro = configuration.mode, split.micro_batches
        replicas = split.replicas if self._apart else 1
        blocks = np.arange(rows).reshape(replicas, -1)
        named = [f"{replicas} replicas"] * (replicas > 1) + [f"{micro} micro-batches"] * (micro > 1)
        if mode.bitwise:
            divisions = [Division(np.arange(rows).reshape(replicas * micro, -1))]
        elif self._is_custom:
            divisions = [Division(blocks)]
            if micro > 1:
                divisions.append(Division(_strided(blocks, micro), within=True))
        else:
            divisions = [Division(_strided(blocks, micro))]
        return [(each, " and ".join(named)) for each in divisions if len(each.parts) > 1]

    def _fix(self) -> str:
        mode, split = self.program.configuration.mode, self.program.split
        if self.program.split_objective.per_replica:
            return "use a mesh without stages"
        if split.micro_batches > 1 and not mode.bitwise:
            return "use accumulate=1"
        return "gather the rows of all replicas with rx.gather(x)"


def examination_of(
    program: Program, phase: Phase, state: TrainState, batch: Batch
) -> LossExamination:
    """Return the examination of a loss, which programs may share, or of a custom step."""
    configuration = program.configuration
    whole = not (configuration.between.apart or _is_apart(program))
    run: LossRun = of_loss(program.objective, phase.key)
    if configuration.step is not None:
        run = partial(run_step, program.custom_step, program.shapes.params)
    key = whole, jax.tree.structure((state, batch)), _shapes(phase, (state, batch))
    known = {} if configuration.examinations is None else configuration.examinations
    if key not in known:
        known[key] = LossExamination(run, state, batch, learns=phase.learns, whole=whole)
    found: LossExamination = known[key]
    return found


def _is_apart(program: Program) -> bool:
    """Whether a replica sees only its own rows."""
    return program.configuration.mode.per_replica or program.split_objective.per_replica


def _shapes(phase: Phase, batch: Any) -> tuple[Any, ...]:
    return phase, *((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch))


def _real_rows(batch: Batch) -> int:
    return int(np.count_nonzero(batch.mask)) if batch.rows is None else batch.rows


def _real(rows: int) -> Division:
    """Return the division of a batch into its first `rows` and the padding."""
    return Division(np.arange(rows)[None], padded=True)


def _strided(blocks: np.ndarray, micro: int) -> np.ndarray:
    """Return the rows of each micro-batch, those of a replica being a block."""
    parts = blocks.reshape(len(blocks), -1, micro)
    return np.swapaxes(parts, 1, 2).reshape(len(blocks) * micro, -1)


def agree_on_model(job: Job, model: PyTree, seed: int) -> None:
    """Raise `AgreementError` if the processes start from different models or seeds."""
    leaves = jax.tree.leaves(model)
    shared = any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves)
    if _agrees(job) and not shared:
        job.agree("the initial model", {"seed": seed, **describe_leaves(model)})


def agree_on_program(
    configuration: Configuration, what: str, arguments: tuple[Any, Any], text: Callable[[], str]
) -> None:
    """Raise `AgreementError` if the processes are about to run different programs."""
    job, mesh = configuration.job, configuration.mesh
    if _agrees(job):
        state, batch = map(shapes_by_path, arguments)
        ids = [device.id for device in mesh.devices.flat]
        devices = [each - min(ids) for each in ids]  # those of other jobs may be anywhere
        where = {"mesh": {**mesh.shape, "devices": devices}}
        job.agree(what, {**configuration.names(), **where, "state": state, "batch": batch})
        job.agree_on_text(what, text())


def _agrees(job: Job) -> bool:
    """Whether there are other processes, or jobs, that could differ."""
    return job.processes > 1 or job.peers is not None

"""Properties of a loss and its model that determine which comparisons are valid."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import dce_jaxpr

from replicax.core.call_checks import TRAINING, examination_of
from replicax.core.first_step.examiner import of_loss, with_gradient
from replicax.core.first_step.loss_check import LossExamination
from replicax.core.first_step.rank_rules import rank_rule
from replicax.core.ground.leaves import by_path
from replicax.core.ground.train_state import TrainState
from replicax.core.step.update import step_key
from replicax.verify.devices_asked import devices_asked
from replicax.verify.difference import Leaves, equations, is_float
from replicax.verify.independence import UNDECIDED, Independence, examine_rows, proven
from replicax.verify.plain_step import PlainStep
from replicax.verify.subject import Subject, results_of

_OUTSIDE = re.compile("callback|ffi")
"""Operations that run code which may return something else each time."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties observed on one device or in the program of the loss."""

    repeatable: bool
    """Whether the same step on one device gives the same bits."""
    random: bool
    """Whether training depends on the key, as with dropout."""
    writes: bool
    """Whether a step changes the model's other arrays, such as BatchNorm statistics."""
    constant_key: bool
    """Whether the loss draws random numbers that do not depend on the key."""
    rows: Independence
    takes_padding: bool
    """Whether the loss ignores padded rows or accounts for them."""
    padding_is_proven: bool
    """Whether the traces show that padded rows change nothing, so that weights of 0 leave them out
    as well as their absence does."""
    weighs: bool
    """Whether the loss excludes padding itself, with `rx.row_weights`."""
    scalars: frozenset[str]
    """Names of results that are one number for the whole batch, regardless of weights."""
    asked: list[str]
    """Device queries that the loss calls."""
    by_rank: str | None
    """A rule of the optimizer by rank that meets stacked layers, in one line."""


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """Properties of a loss that its traces show."""

    examination: LossExamination
    rows: Independence | None
    """How rows depend on one another; None if numbers have to decide."""
    asked: list[str]


def trace_loss(subject: Subject) -> TracedLoss:
    """Trace the loss with several numbers of rows."""
    batch = jax.tree.map(jnp.asarray, subject.full.apart())
    program = subject.parallel(subject.own).program(subject.state)
    with devices_asked() as asked:
        examination = examination_of(program, TRAINING, subject.state, batch)
    whole = subject.rows if subject.rows % 4 == 0 else None
    return TracedLoss(examination, proven(examination, whole) if whole else None, asked)


def examine_subject(subject: Subject, traced: TracedLoss | None = None) -> Facts:
    """Examine the loss and the model on one device, after the first steps of `subject`."""
    reference, traced = PlainStep(subject), traced or trace_loss(subject)
    examination = traced.examination

    def measured(state: TrainState) -> Leaves:
        return results_of(state, *reference(state, subject.full))

    state, program = subject.state, reference.trace(subject.state, subject.full).jaxpr.jaxpr
    first = second = other = measured(state)
    calls_out = any(_OUTSIDE.search(each.primitive.name) for each in equations(program))
    if calls_out or subject.on_accelerators:
        second = measured(dataclasses.replace(state))
    _, reads = dce_jaxpr(program, [True] * len(program.outvars))
    if reads[len(jax.tree.leaves((state.params, state.extras)))]:  # the seed
        other = measured(dataclasses.replace(state, seed=np.uint32(int(state.seed) ^ 1)))
    repeatable = same_bits(first, second)
    random = not repeatable or not same_bits(first, other)
    writes = any(
        is_float(value) and bool(np.any(value))
        for path, value in first.items()
        if path.startswith("extras")
    )
    return Facts(
        repeatable,
        repeatable and random,
        writes,
        examination.draws_alone,
        traced.rows or _rows(subject, examination),
        examination.takes_padding or examination.weighs,
        examination.takes_padding and not examination.weighs and not writes,
        examination.weighs,
        examination.scalars,
        traced.asked,
        rank_rule(subject.updater, subject.state.params, examination.one.jaxpr),
    )


def _rows(subject: Subject, examination: LossExamination) -> Independence:
    """Return how rows depend on one another, from as many as can be split into quarters."""
    whole = subject.rows // 4 * 4
    if not whole:
        return Independence(UNDECIDED, f"{subject.rows} rows are too few to leave any out")
    batch = jax.tree.map(jnp.asarray, subject.some(np.arange(whole)).apart())
    if whole < subject.rows:
        examination = LossExamination(of_loss(subject.objective, step_key), subject.state, batch)
    return examine_rows(examination, jax.tree.map(jnp.asarray, subject.state), batch, subject.eps)


def same_bits(left: Leaves, right: Leaves) -> bool:
    """Whether two results are bitwise equal."""
    return all(value.tobytes() == right[path].tobytes() for path, value in left.items())


def dead_and_stopped(subject: Subject) -> tuple[list[str], list[str]]:
    """Return the parameters that the loss does not depend on, and those without a gradient.

    Read from the program, not from values: a parameter that these rows do not use is neither.
    """
    traced = subject.scored
    paths = [*by_path(subject.state.params)]
    _, reaching = dce_jaxpr(traced.jaxpr, [True] * len(traced.out_avals))
    dead = [path for path, used in zip(paths, reaching, strict=False) if not used]
    moving = zip(paths, with_gradient(traced, len(paths)), strict=True)
    return dead, [path for path, moves in moving if not moves and path not in dead]

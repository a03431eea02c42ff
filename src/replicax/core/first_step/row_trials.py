"""Compare a traced loss or step on parts of a batch with the whole batch, in numbers.

It is computed as traced for training, once as it is and three times with other parameters, rows and
step numbers, and whatever `replicax.core.jaxprs.row_evaluation` replaces.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from replicax.core.data.batch import Batch
from replicax.core.first_step.examiner import Trace
from replicax.core.first_step.row_gradients import gradients_differ
from replicax.core.first_step.trial_inputs import moved_to_one_device, other_inputs
from replicax.core.ground.quick_compile import quick_options
from replicax.core.ground.train_state import TrainState
from replicax.core.jaxprs.row_dependence import Follow
from replicax.core.jaxprs.row_evaluation import RowEvaluation, Undecided, uniform

_EPS = float(np.finfo(np.float32).eps)
_SHARP, _LOOSE = 8, 512
"""Maximum differences of one row's values in units of eps: in the same program, and in another."""
_OF_SUMS = 128
"""Maximum differences of a number for a whole batch, in units of eps."""
_COARSEST = 0.1
"""Upper bound on these, for any dtype, as a share of the largest value."""
_STEPS = (0, 1_000_003, 7, 500, 20)
"""The step number of each trial; 0 for the given state and batch."""


@dataclasses.dataclass(frozen=True)
class Division:
    """Which rows of a batch are computed without the others."""

    parts: np.ndarray
    """int `[parts, rows of one]`."""
    within: bool = False
    """Whether only the losses of a custom step are computed on a part, not its body."""
    padded: bool = False
    """Whether there is one part, of the real rows, and the others are padding."""

    @property
    def size(self) -> int:
        """Return the number of rows of a part."""
        return int(self.parts.shape[1])


@dataclasses.dataclass(frozen=True)
class Pair:
    """A loss or a step traced on the whole batch and on one part, and where rows are in both."""

    whole: Trace
    part: Trace
    of_whole: Follow
    of_part: Follow
    alike: bool
    """Whether the traces correspond, so that what is replaced in one is in the other."""

    @property
    def eps(self) -> float:
        """The rounding unit of the coarsest dtype computed in."""
        avals = [*self.whole.jaxpr.in_avals, *(var.aval for var in self.of_whole.places)]
        floats = {aval.dtype for aval in avals if jnp.issubdtype(aval.dtype, jnp.floating)}
        return max([_EPS, *(float(jnp.finfo(each).eps) for each in floats)])  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True)
class Found:
    """A value on each part of the rows, alone and in the batch, in the first trial."""

    alone: np.ndarray
    together: np.ndarray
    mixes: bool
    """Whether other rows in the other parts change it, in any trial."""
    differs: bool
    """Whether it is another alone, in any trial: it also may by the number or order of rows."""
    decided: bool
    """Whether any of it was finite."""


@dataclasses.dataclass(frozen=True)
class Tested:
    """The results of trials of a value."""

    found: Found
    weighted: bool
    """Whether it is a mean over rows with weights."""
    shown: bool
    """Whether the traces show that it is the same on parts."""


def compared(
    pair: Pair, division: Division, wanted: Sequence[str], state: TrainState, batch: Batch
) -> dict[str, Found]:
    """Return what each label in `wanted` is, on parts of the batch and on the whole batch.

    Raises `Undecided` if numbers cannot tell.
    """
    if pair.of_whole.draws and not pair.alike:
        raise Undecided("random numbers for other rows")
    compiled = partial(jax.jit, compiler_options=quick_options(jax.default_backend()))
    other = compiled(partial(other_inputs, division.parts))
    whole = compiled(partial(_whole, pair, division, wanted))
    verdict = compiled(partial(_verdict, pair, division, wanted))
    losses = pair.whole.examiner.losses & {*wanted} if division.padded else set()
    slopes = losses and compiled(partial(_gradients, pair, division, sorted(losses)))
    state, batch = moved_to_one_device(state, batch)
    verdicts, none, wrong = [], np.int32(-1), False
    for number, step in enumerate(_STEPS):
        first = np.int32(number % len(division.parts))
        trial = np.int32(number)
        given = (*other(state, batch, trial, np.int32(step)), trial)
        changes = np.bool_(step), np.bool_(False)
        together, gathered = whole(*given, *changes, none, None)
        again, _ = whole(*given, *changes, first, gathered or None)
        given = (*given, np.bool_(step and pair.alike))
        pinned, gathered = whole(*given, np.bool_(True), none, None)
        judged = verdict(*given, gathered, first, together, again, pinned)
        verdicts.append(jax.device_get(judged))
        wrong |= bool(slopes and slopes(*given))
    found = {}
    for label in wanted:
        alone, together, *_ = verdicts[0][label]
        flags = (any(bool(each[label][n]) for each in verdicts) for n in (2, 3, 4))
        mixes, differs, decided = flags
        apart = wrong and label in losses
        found[label] = Found(alone, together, mixes or apart, differs or apart, decided)
    return found


def _gradients(pair: Pair, division: Division, losses: Sequence[str], *given: Any) -> jax.Array:
    traces, follows = (pair.whole, pair.part), (pair.of_whole, pair.of_part)
    try:
        return gradients_differ(traces, follows, losses, jnp.asarray(division.parts[0]), *given)
    except Exception as error:  # JAX's, of what has no derivative
        raise Undecided(f"its gradient: {error}".partition("\n")[0]) from error


def _whole(
    pair: Pair,
    division: Division,
    wanted: Sequence[str],
    state: TrainState,
    batch: Batch,
    trial: jax.Array,
    changes: jax.Array,
    pinned: jax.Array,
    first: jax.Array,
    given: list[jax.Array] | None,
) -> tuple[dict[str, list[jax.Array]], list[jax.Array]]:
    """Return what is seen of the whole batch, and what it gathers.

    If `first` is a part's number and not negative, with other rows in all other parts.
    """
    rows = jnp.arange(batch.size)
    own = jnp.zeros(batch.size, bool).at[jnp.asarray(division.parts)[first]].set(True)
    offset = 1 + (uniform(trial, -1, ()) * (batch.size - 1)).astype(jnp.int32)
    source = jnp.where(own | (first < 0), rows, (rows + offset) % batch.size)

    def mixed(leaf: jax.Array) -> jax.Array:
        return leaf[source]

    if not division.within:
        batch = dataclasses.replace(batch, data=jax.tree.map(mixed, batch.data))
    enter = mixed if division.within else None
    told = trial, changes, pinned, rows, enter, given, not division.padded, division.padded
    run = RowEvaluation(pair.of_whole, *told)
    found = run(pair.whole.jaxpr, jax.tree.leaves((state, batch)))
    return _seen(run, wanted, pair.whole.outputs, found), run.gathered


def _verdict(
    pair: Pair,
    division: Division,
    wanted: Sequence[str],
    state: TrainState,
    batch: Batch,
    trial: jax.Array,
    changes: jax.Array,
    given: list[jax.Array],
    first: jax.Array,
    *whole: dict[str, list[jax.Array]],
) -> dict[str, tuple[jax.Array, ...]]:
    """Return, of each label, its first value on parts and on the whole, and the verdicts."""

    def one(rows: jax.Array) -> dict[str, list[jax.Array]]:
        picked = batch if division.within else batch.map_rows(lambda leaf: leaf[rows])
        enter = (lambda leaf: leaf[rows]) if division.within else None
        told = jnp.asarray(True), rows, enter, given, not division.padded, division.padded
        run = RowEvaluation(pair.of_part, trial, changes, *told)
        found = run(pair.part.jaxpr, jax.tree.leaves((state, picked)))
        return _seen(run, wanted, pair.whole.outputs, found)

    alone = lax.map(one, jnp.asarray(division.parts))
    merged = pair.whole.examiner.merged
    by_row = frozenset(wanted) - pair.whole.examiner.scalars - set(pair.whole.outputs) - merged
    verdicts: dict[str, tuple[jax.Array, ...]] = {}
    for label in wanted:
        by_trial = zip(*(seen[label] for seen in (*whole, alone)), strict=True)
        if label in merged:
            share = 1 - division.size / batch.size
            judged = [_judged_merged(share, pinned, of[0]) for _, _, pinned, of in by_trial]
        else:
            is_by_row = label in by_row
            eps = _EPS if division.padded else pair.eps
            judged = [_judged(division, eps, is_by_row, first, *values) for values in by_trial]
        mixes, differs, finite = (jnp.stack(flags) for flags in zip(*judged, strict=True))
        flags = jnp.any(mixes), jnp.any(mixes | differs), jnp.all(finite)
        verdicts[label] = alone[label][0], whole[-1][label][0], *flags
    return verdicts


def _seen(
    run: RowEvaluation, wanted: Sequence[str], outputs: Sequence[str], found: Sequence[jax.Array]
) -> dict[str, list[jax.Array]]:
    """Return what was seen, rows first, and results by name."""
    known = {name: [(value, None)] for name, value in zip(outputs, found, strict=False)} | run.seen
    if missing := [label for label in wanted if label not in known]:
        raise Undecided(f"{len(missing)} values in a while loop")
    return {
        label: [v if dim is None else jnp.moveaxis(v, dim, 0) for v, dim in known[label]]
        for label in wanted
    }


def _judged(
    division: Division,
    eps: float,
    by_row: bool,
    first: jax.Array,
    together: jax.Array,
    again: jax.Array,
    pinned: jax.Array,
    alone: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return whether other rows change a value, whether it differs on parts, and is ever finite.

    It is given for the whole batch, with other rows in other parts, with equal random numbers, and
    for each part alone, with these too.
    """
    finite = jnp.any(jnp.isfinite(pinned)) & jnp.any(jnp.isfinite(alone))
    if not by_row:
        means = jnp.mean(alone, axis=0).reshape(1, -1), pinned.reshape(1, -1)
        differs = _gap_of_rows(*means) > min(_OF_SUMS * eps, _COARSEST)
        return differs, differs, finite
    parts = jnp.asarray(division.parts)
    mine, flat = parts[first], alone.reshape(-1, *alone.shape[2:])
    if flat.shape[1:] != pinned.shape[1:]:  # one row has values for the other rows
        return jnp.asarray(True), jnp.asarray(True), finite
    sharp = _OF_SUMS if division.padded else _SHARP  # padding may shift an exponential
    mixes = _gap_of_rows(together[mine], again[mine]) > sharp * _EPS
    differs = _gap_of_rows(flat, pinned[parts.reshape(-1)]) > min(_LOOSE * eps, _COARSEST)
    return mixes, differs, finite


def _judged_merged(
    share: float, other: jax.Array, one: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the verdicts of `_judged` on an array of a metric that is merged, with padding.

    A `share` of the rows is padding. Rounding may move a row across a threshold, which changes one
    of many counts.
    """
    finite = jnp.any(jnp.isfinite(one)) & jnp.any(jnp.isfinite(other))
    if one.shape != other.shape:  # it has entries for rows, in a dim of its own
        return jnp.asarray(True), jnp.asarray(True), finite
    same = (one == other) | (jnp.isnan(one) & jnp.isnan(other))
    gap = jnp.sum(jnp.where(same, 0, jnp.abs(one - other)))
    differs = ~(gap <= max(_COARSEST * share, _OF_SUMS * _EPS) * jnp.sum(jnp.abs(other)))
    return differs, differs, finite


def _gap_of_rows(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the largest difference, as a share of the largest value in its row.

    Rows with small values count as those a quarter of which are smaller, so that rounding is small
    everywhere, and a few huge values hide nothing.
    """
    one, other = (
        each.reshape(len(each), -1).astype(jnp.promote_types(each.dtype, jnp.float32))
        for each in (one, other)
    )
    same = (one == other) | (jnp.isnan(one) & jnp.isnan(other))
    gaps = jnp.max(jnp.where(same, 0, jnp.abs(one - other)), axis=1, initial=0)
    both = jnp.concatenate([one, other], axis=1)
    sizes = jnp.max(jnp.where(jnp.isfinite(both), jnp.abs(both), 0), axis=1, initial=0)
    least = jnp.nanquantile(jnp.where(sizes > 0, sizes, jnp.nan), 0.25, method="lower")
    scale = jnp.maximum(sizes, jnp.where(jnp.isnan(least), 1, least))
    return jnp.max(jnp.where(jnp.isnan(gaps), jnp.inf, gaps / scale), initial=0)

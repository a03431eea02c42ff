"""Check that rows of a batch have independent losses, by leaving out other rows.

The loss is computed as in training, with the same random numbers for all rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.first_step.loss_check import UNSHOWN, LossExamination
from replicax.core.first_step.row_trials import Division, Tested
from replicax.core.ground.train_state import TrainState
from replicax.core.jaxprs.row_evaluation import Undecided
from replicax.core.step.loss import LOSS
from replicax.text.checks import FAIL, NOTE, PASS, Check

INDEPENDENT = "independent"
ADDED_UP = "summed"
"""Values depend on the number of rows: wrongly divided by it, or not divided."""
WEIGHTED_SCALAR = "weighted scalar"
"""One number, the mean over rows with unequal weights."""
DEPENDENT = "dependent"
UNDECIDED = "unknown"

_UNITS = 512
"""Tolerance in units of eps for two values of one row."""
_COARSEST = 0.1
"""Upper limit of that tolerance, for coarse dtypes."""
_CASE = "rows left out"


@dataclasses.dataclass(frozen=True)
class Independence:
    """How the values of rows depend on one another."""

    kind: str
    text: str
    cause: str = ""
    gathers: bool = False
    """Whether dependent rows are gathered."""
    positional: bool = False
    """Whether a row's value depends on its position in the batch."""

    def check(self, fails: bool) -> Check:
        """Return the check. Rows that depend on one another are an error only if they are split."""
        if self.kind == INDEPENDENT and self.gathers:
            text = "rows depend on others only where the loss gathers them from all replicas"
            return Check("parity", _CASE, PASS, text)
        fails |= self.positional or self.kind in (ADDED_UP, WEIGHTED_SCALAR)
        verdict = PASS if self.kind == INDEPENDENT else FAIL if fails else NOTE
        return Check("parity", _CASE, verdict, self.text, self.cause)


def proven(examination: LossExamination, rows: int) -> Independence | None:
    """Return that quarters of so many rows are independent, if the traces show it."""
    if not examination.proves(Division(np.arange(rows).reshape(4, -1))):
        return None
    text = ONE_NUMBER if LOSS in examination.scalars else INDEPENDENT_ROWS
    return Independence(INDEPENDENT, text, gathers=examination.gathers)


def examine_rows(
    examination: LossExamination, state: TrainState, batch: Batch, eps: float
) -> Independence:
    """Compare the loss on quarters of the rows of `batch`, a multiple of 4, with that on all."""
    division = Division(np.arange(batch.size).reshape(4, -1))
    try:
        tested = examination.tested(division, state, batch)
    except Undecided as reason:
        return Independence(UNDECIDED, f"the loss cannot be computed on few rows: {reason}")
    broken = [name for name, each in tested.items() if each.found.differs or not each.shown]
    name = LOSS if LOSS in broken or not broken else broken[0]
    rows = dataclasses.replace(_kind(name, tested[name], eps), gathers=examination.gathers)
    return rows if name == LOSS else dataclasses.replace(rows, text=f"{name}: {rows.text}")


def _kind(name: str, tested: Tested, eps: float) -> Independence:
    """Return how the rows depend on one another, from what a value is on quarters and on all."""
    alone, whole = (
        np.asarray(each, np.float64) for each in (tested.found.alone, tested.found.together)
    )
    scale = max(np.max(np.abs(alone)), np.max(np.abs(whole))) or 1.0

    def near(left: Any, right: Any) -> bool:
        return bool(np.max(np.abs(left - right)) <= min(_UNITS * eps, _COARSEST) * scale)

    if not tested.found.differs and not tested.found.decided:
        return Independence(UNDECIDED, "the loss is not finite, so numbers cannot be compared")
    if not tested.found.differs and not tested.shown:
        return Independence(UNDECIDED, UNSHOWN)
    if alone.ndim == 1:
        return _kind_of_number(tested, alone, float(whole), near)
    if not tested.found.differs:
        return Independence(INDEPENDENT, INDEPENDENT_ROWS)
    parts, alone = len(alone), alone.reshape(whole.shape)
    for times, factor, words in (
        (f"{parts} times", parts, ("divides", "large")),
        (f"1/{parts}", 1 / parts, ("multiplies", "small")),
    ):
        if near(alone, factor * whole):
            text = f"the value of a row is {times} as large with 1/{parts} of the rows"
            return Independence(ADDED_UP, text, BY_ROWS.format(*words))
    share, first = np.max(np.abs(alone - whole)) / scale, len(whole) // parts
    if near(alone[:first], whole[:first]) and not near(alone, whole):
        text = f"the value of a row changes by {share:.1%} of the largest at another position"
        return Independence(DEPENDENT, text, PLACED, positional=True)
    return _dependent(share)


def _kind_of_number(
    tested: Tested, alone: np.ndarray, whole: float, near: Callable[[Any, Any], bool]
) -> Independence:
    if not tested.found.differs:
        return Independence(INDEPENDENT, ONE_NUMBER)
    if near(whole, np.sum(alone)):
        text = "the loss of all rows is the sum of the losses of their quarters"
        return Independence(ADDED_UP, text, SUM_FOR_MEAN)
    mean = np.mean(alone)
    if tested.weighted:
        text = f"the mean of the losses of quarters is {mean:.4g}, and the loss of all {whole:.4g}"
        return Independence(WEIGHTED_SCALAR, text, MEAN_OF_MEANS)
    return _dependent(abs(whole - mean) / (np.max(np.abs(alone)) or 1.0))


def _dependent(share: float) -> Independence:
    text = f"the value of a row changes by {share:.1%} of the largest if other rows are left out"
    return Independence(DEPENDENT, text, DEPENDS)


INDEPENDENT_ROWS = "row values do not depend on which rows are present"
ONE_NUMBER = "the loss is one number, the mean over rows of equal weight"
MEAN_OF_MEANS = (
    "mean of means: a scalar loss is the mean over rows of unequal weight, and such means cannot "
    "be averaged over replicas or micro-batches; return rx.Weighted(values, weights), whose "
    "numerator and weights are summed before dividing"
)
SUM_FOR_MEAN = (
    "the loss is a sum over the rows it sees, but a scalar loss is treated as a mean: it is N "
    "times too small on N replicas, and K times with K micro-batches; return one value per row, "
    "or the mean"
)
BY_ROWS = (
    "the loss {} by the rows it sees, which are 1/N of the batch on N replicas and 1/K with K "
    "micro-batches: gradients are N or K times too {}; return each row's value unscaled, the mean "
    "over all rows is taken afterwards"
)
PLACED = (
    "the value of a row depends on its position: random numbers that do not depend on the loss's "
    "key (a constant key, or a mask from a fixed seed), or a number per position; replicas, "
    "micro-batches and epochs change positions: draw from the key, or pass it in the batch"
)
DEPENDS = (
    "the rows of a batch depend on one another (a contrastive loss, or statistics over the batch): "
    "replicas and micro-batches that see part of the rows compute a different loss; gather the "
    "rows of all replicas with rx.gather, or use mode='jit' and accumulate=1"
)

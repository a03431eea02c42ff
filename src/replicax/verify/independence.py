"""Check that rows of a batch have independent losses, by leaving out other rows.

The loss is computed in evaluation mode, without random numbers, on several subsets of the rows.
"""

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np

from replicax.checks import FAIL, NOTE, PASS, Check
from replicax.core.loss import Weighted
from replicax.core.models.definition import View
from replicax.errors import ReplicaxError
from replicax.verify.subject import Subject
from replicax.wording import first_line

INDEPENDENT = "independent"
SUMMED = "summed"
"""Values depend on the number of rows: wrongly divided by it, or not divided."""
WEIGHTED_SCALAR = "weighted scalar"
"""One number, the mean over rows with unequal weights."""
DEPENDENT = "dependent"
UNKNOWN = "unknown"

_UNITS = 512
"""Tolerance in units of eps for two values of one row."""
_COARSEST = 0.1
"""Upper limit of that tolerance, for coarse dtypes."""
CASE = "rows left out"


@dataclasses.dataclass(frozen=True)
class Independence:
    """How the values of rows depend on one another."""

    kind: str
    found: str
    cause: str = ""
    gathers: bool = False
    """Whether dependent rows are gathered."""
    placed: bool = False
    """Whether a row's value depends on its position in the batch."""

    def check(self, fails: bool) -> Check:
        """Return the check. Rows that depend on one another are an error only if they are split."""
        if self.kind == DEPENDENT and self.gathers and not self.placed:
            text = "the rows depend on one another, and the loss gathers them from all replicas"
            return Check("parity", CASE, PASS, text)
        fails |= self.placed or self.kind in (SUMMED, WEIGHTED_SCALAR)
        verdict = PASS if self.kind == INDEPENDENT else FAIL if fails else NOTE
        return Check("parity", CASE, verdict, self.found, self.cause)


def examine_rows(subject: Subject, gathers: bool = False, random: bool = True) -> Independence:
    """Compare the loss on subsets of the rows.

    Args:
        subject: the subject of the verification.
        gathers: whether the loss gathers rows.
        random: whether training depends on the key, and so on a row's position.
    """
    probe = _Probe(subject)
    try:
        found = dataclasses.replace(probe.examine(), gathers=gathers)
        if not random and not found.placed:
            with contextlib.suppress(Exception):  # the user's loss, on few rows
                return probe.by_place(jax.random.key(0)) or found
        return found
    except ReplicaxError:
        raise
    except Exception as error:  # the user's loss
        return Independence(
            UNKNOWN,
            "the loss cannot be computed in evaluation mode (key None) or on few rows: "
            f"{first_line(error)}",
        )


class _Probe:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._part = max(1, subject.rows // 4)
        objective = subject.objective

        def values(params: Any, extras: Any, data: Any, key: Any) -> Any:
            returned, _ = objective.definition.apply(
                lambda model: objective.loss(model, objective.precision.to_compute(data), key),
                objective.precision.to_compute(params),
                extras,
                View(key),
            )
            loss = returned[0] if isinstance(returned, tuple) else returned
            return loss.values if isinstance(loss, Weighted) else loss

        self._compiled = jax.jit(values, compiler_options=subject.quick)

    def examine(self) -> Independence:
        if self._subject.rows < 4:
            return Independence(UNKNOWN, f"{self._subject.rows} rows are too few to leave any out")
        if placed := self.by_place(None):
            return placed
        return self._of_scalar() if self._of(0, 1).ndim == 0 else self._of_rows()

    def by_place(self, key: jax.Array | None) -> Independence | None:
        """Check rows that swap positions, in training mode if there is a key."""
        first, swapped = self._of(0, 1, key=key), self._of(1, 0, key=key)
        back = np.roll(swapped, self._part, axis=0) if first.ndim else swapped
        scale = float(np.max(np.abs([first, back]))) or 1.0
        if self._near(first, back, scale):
            return None
        share = float(np.max(np.abs(first - back)) / scale)
        text = f"the loss changes by {share:.1%} of the largest value when rows swap positions"
        return Independence(DEPENDENT, text, PLACED, placed=True)

    def _of(self, *parts: int, key: jax.Array | None = None) -> np.ndarray:
        """Return the loss on some quarters of the rows."""
        rows = np.concatenate([np.arange(self._part) + self._part * part for part in parts])
        state, data = self._subject.state, self._subject.some(rows).data
        return np.asarray(self._compiled(state.params, state.extras, data, key), np.float64)

    def _near(self, left: Any, right: Any, scale: float) -> bool:
        bound = min(_UNITS * self._subject.eps, _COARSEST) * scale
        return bool(np.max(np.abs(np.asarray(left) - np.asarray(right))) <= bound)

    def _of_rows(self) -> Independence:
        alone, both = np.concatenate([self._of(0), self._of(1)]), self._of(0, 1)
        scale = float(np.max(np.abs(both))) or 1.0
        if self._near(alone, both, max(scale, float(np.max(np.abs(alone))))):
            return Independence(INDEPENDENT, "row values do not depend on which rows are present")
        for times, factor in (("twice", 2.0), ("half", 0.5)):
            if self._near(alone, factor * both, scale):
                text = f"the value of a row is {times} as large with half the rows"
                words = ("divides", "large") if factor > 1 else ("multiplies", "small")
                return Independence(SUMMED, text, BY_ROWS.format(*words))
        return _dependent(np.max(np.abs(alone - both)) / scale)

    def _of_scalar(self) -> Independence:
        a, b, both = (float(self._of(*parts)) for parts in ((0,), (1,), (0, 1)))
        scale = max(abs(a), abs(b), abs(both)) or 1.0
        if self._near(both, (a + b) / 2, scale):
            text = "the loss is one number, the mean over rows of equal weight"
            return Independence(INDEPENDENT, text)
        if self._near(both, a + b, scale):
            text = "the loss of two sets of rows together is the sum of both losses"
            return Independence(SUMMED, text, SUM_FOR_MEAN)
        if self._is_weighted_mean(a, b, both, scale):
            text = (
                f"the loss of some rows is {a:.4g}, of equally many others {b:.4g}, and of both "
                f"{both:.4g} instead of {(a + b) / 2:.4g}"
            )
            return Independence(WEIGHTED_SCALAR, text, MEAN_OF_MEANS)
        return _dependent(abs(both - (a + b) / 2) / scale)

    def _is_weighted_mean(self, a: float, b: float, both: float, scale: float) -> bool:
        """Whether weights of the parts explain all results: two are fitted, a third predicted."""
        c, with_c, all_three = (float(self._of(*parts)) for parts in ((2,), (0, 2), (0, 1, 2)))
        if (both - b) == 0 or (with_c - c) == 0:
            return False
        of_b, of_c = (a - both) / (both - b), (a - with_c) / (with_c - c)
        if not (of_b > 0 and of_c > 0):
            return False
        foretold = (a + of_b * b + of_c * c) / (1 + of_b + of_c)
        # Each ratio has the rounding error of a difference, and so does the prediction.
        spread = max(abs(both - b), abs(with_c - c), 1e-30)
        return self._near(foretold, all_three, scale * max(1.0, 4 * scale / spread))


def _dependent(share: float) -> Independence:
    text = f"the value of a row changes by {share:.1%} of the largest if other rows are left out"
    return Independence(DEPENDENT, text, DEPENDS)


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

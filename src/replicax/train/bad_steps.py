"""Which steps were skipped, on which examples, and when there are too many of them in a row."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from replicax.core.job import Job
from replicax.core.loss import LOSS
from replicax.errors import ConfigError, DivergedError
from replicax.train.dispatched import Dispatched
from replicax.train.guarded import SPIKE
from replicax.train.records import Record

_NAMED = 8
"""Examples that a message names; the record has them all."""


class BadSteps:
    """Follows the steps of a guarded twin; gives a `Record` for each whose update was skipped.

    Args:
        most_in_a_row: bad steps in a row at which the run ends. `optax.apply_if_finite` would go on
            then, and apply the update.
        job: of the processes.

    Raises:
        ConfigError: fewer than 1.
    """

    def __init__(self, most_in_a_row: int, job: Job) -> None:
        if most_in_a_row < 1:
            raise ConfigError(
                f"most={most_in_a_row} of a Guard; a run ends at the first bad step or later: "
                "use at least 1"
            )
        self.in_a_row = 0
        """Bad steps since the last good one, as far as they are read; set it where a run resumes.
        """
        self._most, self._job = most_in_a_row, job
        self._skipped: list[Record] = []  # of those in a row

    def finished(self, step: Dispatched) -> list[Record]:
        """Return a record of a step that has finished, if its update was skipped."""
        spike = step.spike is not None and bool(step.spike)
        if not spike and not bool(step.not_finite):
            self.in_a_row = 0
            self._skipped.clear()
            return []
        self.in_a_row += 1
        self._skipped.append(_record(step, spike))
        return self._skipped[-1:]

    def check(self) -> None:
        """Raise where too many steps in a row were bad; to be called when their records are kept.

        Raises:
            DivergedError: it names the steps, and the examples of the first.
        """
        if self.in_a_row < self._most or not self._skipped:
            return
        first, last = self._skipped[0], self._skipped[-1]
        begin, end = last.step - self.in_a_row + 1, last.step
        on = "first on" if first.step == begin else f"step {first.step} on"
        when, those = f"in {self.in_a_row} steps in a row, {begin} to {end}", "all were"
        if begin == end:
            on, when, those = "on", f"at step {end}", "it was"
        # Before anybody ends, which would break what others still read.
        self._job.agree("the bad steps", {"first": begin, "last": end})
        self._job.barrier("too many bad steps")
        raise DivergedError(
            f"{self._what()} {when} ({on} {_examples_text(first)}); {those} skipped: lower the "
            "learning rate, clip the gradient, or look at these examples"
        )

    def rewind(self, in_a_row: int) -> None:
        """Forget the steps that are to be done again.

        Args:
            in_a_row: what `in_a_row` was where the run goes on.
        """
        self.in_a_row = in_a_row
        self._skipped.clear()

    def _what(self) -> str:
        """What was wrong with them."""
        spikes = {SPIKE in record.metrics for record in self._skipped}
        if spikes == {False}:
            return "the loss or its gradient was not finite"
        if spikes == {True}:
            return "the loss was far above those before"
        return "the loss was far above those before, or it or its gradient was not finite,"


def _record(step: Dispatched, spike: bool) -> Record:
    """That of a step whose update was skipped."""
    real = _whole(step.mask) > 0
    examples = tuple(int(each) for each in _whole(step.index)[real])
    metrics = {LOSS: float(step.metrics[LOSS])} | ({SPIKE: 1.0} if spike else {})
    rows, at = len(examples) if step.rows is None else step.rows, step.place
    return Record("skip", at.step, at.epoch, metrics, rows, 0.0, examples=examples)


def _whole(array: jax.Array) -> np.ndarray:
    """`array` on the host; where other processes hold parts of it, all of them ask at once."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def _examples_text(record: Record) -> str:
    """`examples 17, 203, 5, ... of epoch 3`."""
    examples = record.examples or ()
    more = ", ..." if len(examples) > _NAMED else ""
    plural = "s" if len(examples) != 1 else ""
    names = ", ".join(map(str, examples[:_NAMED])) or "none"
    return f"example{plural} {names}{more} of epoch {record.epoch}"

"""A program's step in one case, run side by side with its single-device reference."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from replicax.core.data.batch import Batch
from replicax.verify.difference import Leaves, bounds, rounding_noise
from replicax.verify.facts import Facts
from replicax.verify.form import Form
from replicax.verify.subject import Case, Subject, named_results, results_of
from replicax.verify.trial import Trial

_OF_FLOAT32 = 2.0**-23


class AsGiven(Form):
    """The calling convention of a step that places its own arguments."""

    def arguments(self, state: Any, batch: Any, key: Any) -> tuple[Any, ...]:
        """Return the arguments unchanged: a batch records on the host which rows are padding."""
        return state, batch

    def again(self, returned: Any) -> Any:
        """Return the state unchanged."""
        return returned


@dataclasses.dataclass(frozen=True)
class ProgramTrial(Trial):
    """A case of a program and its reference.

    Gradients are compared directly; parameters are compared with one device's optimizer update for
    the gradient that was found, since Adam would amplify a rounding error to a full update.
    """

    subject: Subject
    facts: Facts
    case: Case

    def _expected(self, batches: Sequence[Any], before: Any) -> Leaves:
        """Return one device's results over all batches, without the optimizer state."""
        before = after = self.subject.state if before is self.state else before
        for batch in batches:
            after, metrics = self.reference(after, batch)
        weigh = not all(np.isin(batch.mask, (0, 1)).all() for batch in batches)
        found = results_of(before, after, metrics)
        return {path: found[path] for path in found if not (weigh and path in self.facts.scalars)}

    def given(self, found: Leaves, expected: Leaves) -> Leaves:
        """Return `expected` with the optimizer's update for the gradient that was found."""
        return {**expected, **self.subject.updated(found, self.state)}

    def bounds(self, expected: Leaves, batches: Sequence[Any], rows: int) -> Leaves:
        """Return bounds on rounding, including that of the reduction."""
        plain = self.plain_bounds(batches, rows)
        dp = self.subject.parallel(self.case)
        error = getattr(dp.reduction, "error", None)
        roundings = dp.micro_shards.bit_length() if self.case.mode.bitwise else 2
        share = error(roundings) if error else 0.0
        if not share:
            return plain
        measuring, state = dataclasses.replace(self.case, magnitudes=True), self.subject.state
        parts = results_of(state, *self.subject.run(measuring, batches[0]))
        return {
            path: bound + share * np.abs(parts[path]) if path.startswith("gradient") else bound
            for path, bound in plain.items()
        }

    def plain_bounds(self, batches: Sequence[Any], rows: int) -> Leaves:
        """Return bounds on rounding by anything but the reduction."""
        return self.once("bounds", batches, lambda: self._bounds(batches, rows))

    def _bounds(self, batches: Sequence[Batch], rows: int) -> Leaves:
        """Return bounds on one device's results; those of updates are for the same gradient."""
        subject, expected = self.subject, self.expected(batches)
        gradient = {path: each for path, each in expected.items() if path.startswith("gradient")}
        found = {"loss": expected["loss"], **gradient}
        changed = subject.updated(found, self.state)
        of_update = rounding_noise(
            lambda state, gradient: subject.updated({**found, **gradient}, state),
            self.state,
            gradient,
            eps=_OF_FLOAT32,
            expected=changed,
        )
        noise, stored = self.noise(expected, batches), self.stored()
        return {
            **bounds(expected, noise, terms=rows, eps=self.eps, stored=stored),
            **bounds(changed, of_update, terms=rows, eps=_OF_FLOAT32, stored=stored),
        }

    def noise(self, expected: Leaves, batches: Sequence[Any]) -> Leaves:
        """Return how much rounding changes each element of `expected`.

        Of the same rows with other weights, it is as much more as fewer rows average it out.
        """
        subject, full = self.subject, [self.subject.full]
        same = any(batches[0] is each for each in (*full, subject.padded, subject.weighted))
        if len(batches) > 1 or not same:
            return super().noise(expected, batches)
        make = super().noise
        of_full = self.once("noise", full, lambda: make(self.expected(full), full))
        weights = np.asarray(batches[0].mask)
        more = math.sqrt(weights.size * np.sum(weights**2)) / np.sum(weights)
        return {
            path: more * (each if each.shape == value.shape else each[: len(value)])
            for path, value in expected.items()
            if (each := of_full.get(path)) is not None
        }

    def trace(self, batch: Batch) -> Any:
        """Return the step's jaxpr."""
        return self.subject.trace(self.case, batch).jaxpr

    def named(self, by_path: Mapping[str, Any]) -> dict[str, Any]:
        """Return results by their names in the table."""
        return named_results(by_path)

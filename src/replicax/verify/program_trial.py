"""A program's step in one case, run side by side with one device that does the same."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from replicax.core.batch import Batch
from replicax.core.update import TrainState
from replicax.verify.copies import Copies, read_copies
from replicax.verify.difference import (
    SEEDS,
    Leaves,
    bounds,
    changes,
    leaves,
    rounding_noise,
)
from replicax.verify.facts import Facts
from replicax.verify.form import Form
from replicax.verify.subject import Case, Subject, judged, named_results
from replicax.verify.trial import Trial

_OF_FLOAT32 = 2.0**-23


@dataclasses.dataclass(frozen=True)
class ProgramTrial(Trial):
    """A case of a program and what it is compared with, as `verify_step` has a step and another.

    The gradient is compared, and the parameters with what one device's optimizer makes of the
    gradient that was found: Adam would make of a rounding as much as of any gradient.
    """

    subject: Subject
    case: Case
    single: Case
    """Case of one device."""
    real_rows: bool
    """Whether one device is given the real rows only."""
    scalars: frozenset[str]
    """Names of what does not follow from the rows' weights."""
    known: dict[Any, Any]
    """Results of one device, for all trials of a program."""

    def expected(self, batches: Sequence[Any], *, state: Any = None) -> Leaves:
        """Return what one device gives over all batches."""
        if state is not None:
            return self._on_one(batches, state)
        return self._once("expected", batches, lambda: self._on_one(batches, self.state))

    def _on_one(self, batches: Sequence[Batch], before: TrainState) -> Leaves:
        before = state = dataclasses.replace(before, reduction=())
        metrics: Mapping[str, Any] = {}
        for batch in batches:
            state, metrics = self.subject.run(self.single, self._seen(batch), state)
        found = judged(changes({"state": before}, {"state": state, "metrics": metrics}))
        if all(np.isin(batch.mask, (0, 1)).all() for batch in batches):
            return found
        return {path: value for path, value in found.items() if path not in self.scalars}

    def given(self, found: Leaves, expected: Leaves) -> Leaves:
        """Return `expected` with what the optimizer makes of the gradient that was found."""
        return {**expected, **self.subject.updated(found)}

    def bounds(self, expected: Leaves, batches: Sequence[Any], rows: int) -> Leaves:
        """Return what rounding explains, in the reduction too."""
        plain = self._once("bounds", batches, lambda: self._bounds(batches, rows))
        dp = self.subject.parallel(self.case)
        error = getattr(dp.reduction, "error", None)
        roundings = dp.micro_shards.bit_length() if self.case.mode.bitwise else 2
        share = error(roundings) if error else 0.0
        if not share:
            return plain
        measuring = dataclasses.replace(self.case, magnitudes=True)
        parts = self.subject.measured(measuring, batches[0])
        return {
            path: bound + share * np.abs(parts[path]) if path.startswith("gradient") else bound
            for path, bound in plain.items()
        }

    def _bounds(self, batches: Sequence[Batch], rows: int) -> Leaves:
        """Bounds on one device's results, those of the optimizer's for the very gradient."""
        subject, state, expected = self.subject, self.state, self.expected(batches)
        noise = rounding_noise(
            lambda state, moved: self.expected(moved, state=state),
            state,
            list(batches),
            eps=self.eps,
            seeds=SEEDS,
            expected=expected,
        )
        gradient = {path: each for path, each in expected.items() if path.startswith("gradient")}
        found = {"loss": expected["loss"], **gradient}
        changed = subject.updated(found)
        of_update = rounding_noise(
            lambda state, gradient: subject.updated({**found, **gradient}, state),
            state,
            gradient,
            eps=_OF_FLOAT32,
            expected=changed,
        )
        values = named_results(leaves({"state": state}))
        return {
            **bounds(expected, noise, terms=rows, eps=self.eps),
            **bounds(changed, of_update, terms=rows, eps=_OF_FLOAT32, values=values),
        }

    def run(self, batches: Sequence[Any]) -> Copies:
        """Return what every replica holds after all batches, and the last metrics."""
        state = self.state
        metrics: Mapping[str, Any] = {}
        for batch in batches:
            state, metrics = self.subject.run(self.case, batch, state)
        return self.read({"state": state, "metrics": metrics})

    def read(self, results: Mapping[str, Any]) -> Copies:
        """Return the results of the step, copied to the host from every device."""
        copies = read_copies(results, {})
        return dataclasses.replace(copies, held=self.named(copies.held))

    def named(self, by_path: Mapping[str, Any]) -> dict[str, Any]:
        """Return results by the names that they have in the table."""
        return named_results(by_path)

    def trace(self, batch: Batch) -> Any:
        """Return the step's jaxpr, traced afresh."""
        return self.subject.trace(self.case, batch).jaxpr

    def _seen(self, batch: Batch) -> Batch:
        """The rows that one device is given."""
        real = np.flatnonzero(np.asarray(batch.mask))
        if not self.real_rows or len(real) in (0, batch.size):
            return batch
        cut: Batch = jax.tree.map(lambda leaf: leaf[real], batch)
        return dataclasses.replace(cut, rows=len(real))

    def _once(self, what: str, batches: Sequence[Batch], make: Any) -> Leaves:
        key = (what, self.single, self.real_rows, *map(id, batches))
        if key not in self.known:
            self.known[key] = (batches, make())  # kept, and so no other has its id
        result: Leaves = self.known[key][1]
        return result


def trial_of(subject: Subject, facts: Facts, case: Case, known: dict[Any, Any]) -> ProgramTrial:
    """Return a case with what it is compared with.

    Args:
        subject: what is verified.
        facts: about its loss and model.
        case: one of its cases.
        known: what one device gave so far.
    """
    single, against = subject.single, "one device"
    if facts.random and case.draws_apart and subject.replicas > 1:
        single = Case(subject.emulated, case.micro_batches)
        against = f"{subject.replicas} replicas on one device"
    elif facts.random or facts.writes:
        single = dataclasses.replace(single, micro_batches=case.micro_batches)
    replicas = subject.replicas if case.devices > 1 else 1
    return ProgramTrial(
        Form(
            lambda state, batch: subject.run(case, batch, state),
            replicas=replicas,
            state_like=subject.state,
            batch_like=subject.full,
        ),
        lambda state, batch: subject.run(single, batch, state),
        subject.begun(case),
        None,
        subject.eps,
        {},
        against=against,
        draws=facts.random,
        subject=subject,
        case=case,
        single=single,
        real_rows=not (facts.random or facts.writes),
        scalars=facts.scalars,
        known=known,
    )

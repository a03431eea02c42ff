"""N devices against one: loss, metrics, gradient, parameters and extras, leaf by leaf."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from replicax.checks import FAIL, PASS, SKIP, Check, Verdict
from replicax.core.batch import Batch
from replicax.core.loss import LOSS
from replicax.core.update import TrainState
from replicax.errors import ReplicaxError
from replicax.verify.causes import likely_cause
from replicax.verify.difference import (
    Difference,
    Leaves,
    bounds,
    differences,
    leaves,
    rounding_noise,
)
from replicax.verify.evidence import Evidence
from replicax.verify.facts import Facts
from replicax.verify.independence import DEPENDENT, SUMMED, WEIGHTED_SCALAR
from replicax.verify.subject import Case, Result, Subject
from replicax.wording import first_line

FULL, PADDED, WEIGHTED = "full", "padded", "unequal weights"
BATCHES = (FULL, PADDED, WEIGHTED)
_SEEDS = 3

NOT_FINITE = (
    "the loss or its gradient is not finite there, and a run skips such a step: look at what "
    "becomes NaN or infinite, in rows of weight 0 too (jax_debug_nans finds the operation)"
)
CONSTANT_KEY = (
    "a constant key: the loss draws random numbers (a dropout mask, say) that do not follow from "
    "its key argument, so every replica, every micro-batch and every step draws the same ones, a "
    "shared mask; draw from the key that the loss is given"
)
Show = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class _Reference:
    """What one device gives, and what rounding can move in it."""

    name: str
    result: Result
    bounds: Leaves
    update_bounds: Leaves


class Parity:
    """Compares every case with one device, and keeps what that gives.

    Args:
        subject: what is verified.
        facts: about its loss and model.
        show: told what is next.
    """

    def __init__(self, subject: Subject, facts: Facts, show: Show) -> None:
        self._subject, self._facts, self._show = subject, facts, show
        self._references: dict[Any, _Reference] = {}

    def checks(self, cases: Iterable[Case]) -> Iterator[Check]:
        """A row for each case and batch."""
        for case in cases:
            for kind in BATCHES:
                if kind == WEIGHTED and self._facts.rows.scalar:
                    continue  # one number a batch has no weights
                self._show(f"parity: {case}, {kind}")
                yield self._check(case, kind)

    def _check(self, case: Case, kind: str) -> Check:
        name = f"{case}, {kind}"
        if not self._facts.repeatable:
            return Check(
                "parity", name, SKIP, "two runs on one device differ: nothing to compare with"
            )
        if case.mode.bitwise and (reason := self._only_bits()):
            return Check("parity", name, SKIP, reason)
        try:
            found = self._subject.run(case, self._batch(kind))
        except ReplicaxError as error:
            fails = case == self._subject.own and (kind != PADDED or self._facts.takes_padding)
            return Check("parity", name, FAIL if fails else SKIP, f"refused: {error}")
        except Exception as error:
            return Check("parity", name, FAIL, first_line(error))
        reference = self._reference(case, kind)
        return self._compared(case, kind, found, reference)

    def _only_bits(self) -> str:
        if self._facts.random:
            return "its random numbers are drawn by micro-shard; see the bits of exact"
        if self._facts.writes:
            return "its batch statistics are those of a micro-shard; see the bits of exact"
        return ""

    def _compared(self, case: Case, kind: str, found: Result, reference: _Reference) -> Check:
        expected = reference.result
        name = f"{case}, {kind}"
        if found.skipped or expected.skipped:
            where = name if found.skipped else reference.name
            return Check("parity", name, FAIL, f"{where}: the step is skipped", NOT_FINITE)
        gradient, _ = found.state.opt_state
        updated = self._subject.updated(jax.device_get(gradient), np.float32(found.measured[LOSS]))
        allowed = self._allowed(case, kind, reference)
        pairs = (
            ("", found.measured, expected.measured, allowed),
            ("params", found.params, updated, reference.update_bounds),
            ("extras", found.extras, expected.extras, reference.bounds),
        )
        found_all = [
            dataclasses.replace(each, path=prefix + each.path)
            for prefix, here, there, bound in pairs
            for each in differences(here, there, bound)
        ]
        figures: dict[str, Any] = {"against": reference.name, "differing": len(found_all)}
        if not found_all:
            scales = {path: np.abs(value).max(initial=0) for path, value in pairs[0][2].items()}
            share = _largest_share(found.measured, expected.measured, scales)
            figures |= {"largest": share, "of_bound": _largest_share(*pairs[0][1:])}
            text = f"as {reference.name}, to {share:.1e} of each leaf's scale"
            return Check("parity", name, PASS, text, "", figures)
        verdict: Verdict = FAIL
        if self._facts.rows.kind == DEPENDENT and case != self._subject.own:
            verdict = SKIP
        cause = self._cause(case, kind, found, reference, allowed, found_all)
        first = found_all[0]
        count = sum(len(there) for _, _, there, _ in pairs)
        text = f"{first}; {len(found_all)} of {count} leaves, against {reference.name}"
        return Check("parity", name, verdict, text, cause, {**figures, "first": first.to_json()})

    def _cause(
        self,
        case: Case,
        kind: str,
        found: Result,
        reference: _Reference,
        allowed: Leaves,
        differing: list[Difference],
    ) -> str:
        rows = self._facts.rows
        if rows.kind in (WEIGHTED_SCALAR, DEPENDENT):
            return rows.cause
        if rows.kind == SUMMED and differing[0].ratio is not None:
            return rows.cause
        if self._facts.constant_key:
            return CONSTANT_KEY
        batch = self._batch(kind)
        alone = kind == FULL and not self._facts.random
        return likely_cause(
            Evidence(
                found.measured,
                reference.result.measured,
                allowed,
                batch.size,
                self._subject.replicas if case.draws_apart else 1,
                case.micro_batches,
                None if kind == FULL else np.asarray(batch.mask, np.float64),
                self._on_rows if alone else None,
            )
        )

    def _on_rows(self, indices: np.ndarray) -> Leaves:
        subject = self._subject
        return subject.run(subject.single, subject.some(indices)).measured

    # One device.

    def _reference(self, case: Case, kind: str) -> _Reference:
        """What `case` is compared with on a batch of this kind."""
        subject, facts = self._subject, self._facts
        batch, single = self._batch(kind), subject.single
        name = "one device"
        if facts.random and case.draws_apart and subject.replicas > 1:
            single = Case(subject.emulated, case.micro_batches)
            name = f"{subject.replicas} replicas on one device"
        elif facts.random or facts.writes:
            single = dataclasses.replace(single, micro_batches=case.micro_batches)
        elif kind == PADDED:
            batch, name = subject.some(np.arange(subject.real_rows)), "one device without padding"
        if (single, kind) not in self._references:
            self._references[single, kind] = self._made(name, single, batch)
        return self._references[single, kind]

    def _made(self, name: str, single: Case, batch: Batch) -> _Reference:
        subject = self._subject
        state = subject.state

        def computed(state: TrainState, data: Any) -> Leaves:
            result = subject.run(single, dataclasses.replace(batch, data=data), state)
            return {**result.measured, **result.extras}

        result = subject.run(single, batch)
        gradient, _ = result.state.opt_state
        loss = np.float32(result.measured[LOSS])

        def updated(pair: tuple[TrainState, Any], _batch: Any) -> Leaves:
            return subject.updated(pair[1], loss, pair[0])

        eps, rows = subject.eps, batch.size
        noise = rounding_noise(computed, state, batch.data, eps=eps, seeds=_SEEDS)
        expected = {**result.measured, **result.extras}
        of_update = rounding_noise(updated, (state, jax.device_get(gradient)), None, eps=2.0**-23)
        changed = subject.updated(jax.device_get(gradient), loss)
        return _Reference(
            name,
            result,
            bounds(expected, noise, terms=rows, eps=eps),
            bounds(changed, of_update, terms=rows, eps=2.0**-23, values=leaves(state.params)),
        )

    def _allowed(self, case: Case, kind: str, reference: _Reference) -> Leaves:
        """The bounds of rounding, and for the gradient what the reduction may round besides."""
        dp = self._subject.parallel(case)
        error = getattr(dp.reduction, "error", None)
        roundings = dp.micro_shards.bit_length() if case.mode.bitwise else 2
        share = error(roundings) if error else 0.0
        if not share:
            return reference.bounds
        measuring = dataclasses.replace(case, magnitudes=True)
        parts = self._subject.run(measuring, self._batch(kind)).measured
        return {
            path: bound + share * np.abs(parts[path]) if path.startswith("gradient") else bound
            for path, bound in reference.bounds.items()
        }

    def _batch(self, kind: str) -> Batch:
        subject = self._subject
        return {FULL: subject.full, PADDED: subject.padded, WEIGHTED: subject.weighted}[kind]


def _largest_share(
    found: Leaves, expected: Leaves, scales: Mapping[str, np.ndarray | float]
) -> float:
    """Over all leaves: the largest difference, as a share of the leaf's scale."""
    shares = [0.0]
    for path, value in expected.items():
        gap = np.abs(np.asarray(found[path], np.float64) - value)
        scale = np.broadcast_to(scales.get(path, 0.0), gap.shape)
        known = np.isfinite(scale) & (scale > 0)
        shares.append(float(np.max(gap[known] / scale[known], initial=0.0)))
    return max(shares)

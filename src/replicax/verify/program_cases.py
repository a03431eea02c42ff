"""Checks of a program in each of its cases, like those of `verify_step` for a step."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from replicax.core.step.loss import LOSS
from replicax.errors import ReplicaxError
from replicax.text.checks import FAIL, NOTE, PASS, SKIP, Check
from replicax.text.wording import first_line, named
from replicax.verify.batch_rows import shuffled
from replicax.verify.copies import Copies
from replicax.verify.difference import Difference
from replicax.verify.facts import Facts, dead_and_stopped
from replicax.verify.gradient_checks import NOT_LINEAR, GradientChecks
from replicax.verify.independence import ADDED_UP, DEPENDENT, WEIGHTED_SCALAR
from replicax.verify.plain_step import PlainStep
from replicax.verify.program_trial import AsGiven, ProgramTrial
from replicax.verify.residual import check_residual
from replicax.verify.stages import VerifyStage
from replicax.verify.step_checks import (
    Stepped,
    consecutive,
    determinism,
    parameters,
    recompilation,
    same_on_all_replicas,
)
from replicax.verify.step_parity import parity
from replicax.verify.subject import Case, SkippedStepError, Subject

FULL, PADDED, WEIGHTED = "full", "padded", "unequal weights"
NEGATED = "padded, other signs"
_STEPS = 3
"""Steps before every copy is compared."""
NOT_REPEATABLE = "two runs on one device differ, so there is nothing to compare with"
_SHOWN = 4
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class ProgramCases:
    """A program in each of its cases, compared with one device."""

    def __init__(self, subject: Subject, facts: Facts, surrogates: Collection[str] = ()) -> None:
        self._subject, self._facts = subject, facts
        self._gradients = GradientChecks(PlainStep(subject), surrogates)
        self._known: dict[Any, Any] = {}
        self._own_copies: Copies | None = None
        self._alike: dict[Case, Check] = {}
        self._pads = facts.takes_padding
        self.trial = functools.lru_cache(maxsize=1)(self._trial)
        """Returns a case together with its reference."""
        batches = {FULL: subject.full, PADDED: subject.padded}
        if facts.weighs:  # the largest of values and zeros is right if one is positive
            batches[NEGATED] = subject.negated
        # A scalar loss has no row weights.
        self._batches = batches if LOSS in facts.scalars else batches | {WEIGHTED: subject.weighted}

    def compile_ahead(self, case: Case) -> None:
        """Begin to compile what the rows on a case run, of the step and of its reference."""
        if self._not_compared(case):
            return
        self._subject.compile_ahead(case, self._subject.full)
        reference = self._reference(case)
        for batch in self._batches.values():
            reference.compile_ahead(batch)

    def _trial(self, case: Case) -> ProgramTrial:
        subject, facts = self._subject, self._facts
        reference = self._reference(case)
        emulates = reference.replicas > 1
        return ProgramTrial(
            AsGiven(
                lambda state, batch: subject.run(case, batch, state),
                replicas=subject.replicas if case.devices > 1 else 1,
            ),
            reference,
            subject.placed(case, subject.state),
            None,
            subject.eps,
            {},
            against=f"{subject.replicas} replicas on one device" if emulates else "one device",
            draws=facts.random,
            micro_batches=case.micro_batches,
            known=self._known,
            subject=subject,
            facts=facts,
            case=case,
        )

    def _reference(self, case: Case) -> PlainStep:
        subject, facts = self._subject, self._facts
        own_draws = case.mode.per_replica and not case.mode.bitwise
        if facts.random and own_draws and subject.replicas > 1:
            return PlainStep(subject, subject.replicas, case.micro_batches, real_rows=False)
        if facts.writes or (facts.random and case.micro_batches > 1):
            # Results depend on how rows are batched.
            return PlainStep(subject, parts=case.micro_batches, real_rows=False)
        return PlainStep(subject, real_rows=not facts.padding_is_proven)

    def stages(self, case: Case) -> list[VerifyStage]:
        """Return the stages of a case, one for each batch."""

        def stage(kind: str) -> VerifyStage:
            return f"parity: {case}, {kind}", lambda: [self.parity(case, kind)]

        return [stage(kind) for kind in self._batches]

    def parity(self, case: Case, kind: str) -> Check:
        """Return the row on a case with one of the batches."""
        name, own = f"{case}, {kind}", case == self._subject.own
        if reason := self._not_compared(case):
            return Check("parity", name, SKIP, reason)
        try:
            check, copies = parity(
                self.trial(case),
                name,
                [self._batches[kind]],
                weights=None if kind == FULL else ".mask",
                known=functools.partial(self._known_cause, kind),
            )
        except SkippedStepError as skipped:
            if kind == NEGATED:
                return Check("parity", name, SKIP, "not finite if all floats have the other sign")
            return Check("parity", name, FAIL, f"{skipped}: the step is skipped", SKIPPED)
        except ReplicaxError as error:
            self._pads &= not (own and kind == PADDED)
            fails = own and (kind not in (PADDED, NEGATED) or self._facts.takes_padding)
            return Check("parity", name, FAIL if fails else SKIP, f"refused: {error}")
        except Exception as error:
            return Check("parity", name, FAIL, first_line(error))
        if own and kind == FULL:
            self._own_copies = copies
        elif kind == FULL and copies is not None:
            batches = [self._subject.full]
            self._alike[case] = same_on_all_replicas(self.trial(case), batches, copies, str(case))
        if check.verdict == FAIL and self._facts.rows.kind == DEPENDENT and not own:
            return dataclasses.replace(check, verdict=SKIP)
        if check.verdict == FAIL and kind == WEIGHTED and self._gradients.unlinear:
            text = (
                f"{NOT_LINEAR.format(self._gradients.unlinear)}: rows of a run have weight 1 or 0"
            )
            return Check("parity", name, SKIP, text)
        return check

    def _not_compared(self, case: Case) -> str:
        if not self._facts.repeatable:
            return NOT_REPEATABLE
        if case.mode.bitwise and self._facts.random:
            return "its random numbers are drawn per micro-shard; see the bits of exact"
        if case.mode.bitwise and self._facts.writes:
            return "its batch statistics are per micro-shard; see the bits of exact"
        return ""

    def _known_cause(self, kind: str, differing: Sequence[Difference]) -> str:
        rows, unlinear = self._facts.rows, self._gradients.unlinear
        if unlinear and differing[0].path.startswith("gradient"):
            return f"{NOT_LINEAR.format(unlinear)}: {SEEDED}"
        if rows.kind in (WEIGHTED_SCALAR, DEPENDENT):
            return rows.cause
        if rows.kind == ADDED_UP and differing[0].ratio is not None:
            return rows.cause
        if self._facts.weighs and kind in (PADDED, NEGATED):
            return PADDING_COUNTS
        return CONSTANT_KEY if self._facts.constant_key else ""

    @functools.cached_property
    def runs(self) -> bool:
        """Whether the program's own case runs; parity reports why not."""
        if self._own_copies is None:
            with contextlib.suppress(Exception):
                self._own_copies = self.trial(self._subject.own).run([self._subject.full])
        return self._own_copies is not None

    def topics(self, cases: Sequence[Case], runs: Callable[[Case], bool]) -> list[VerifyStage]:
        """Return the stages on parameters, on the replicas of each case, and on the own case.

        `runs` is asked when the stage of a case begins.
        """
        subject, own = self._subject, self._subject.own
        single = [own, *(each for each in cases if each.micro_batches == 1)]

        def replicas(case: Case) -> VerifyStage:
            return (
                f"replicas: {case}",
                lambda: [self.replicas(case)] if case == own or runs(case) else [],
            )

        return [
            ("gradient", self.gradient),
            ("parameters", self.parameters),
            *(replicas(case) for case in dict.fromkeys(single) if case.devices > 1),
            ("residual", lambda: check_residual(self.trial(own), subject.full)),
            (f"determinism: {own}", self.determinism),
            (f"recompilation: {own}", lambda: [self.recompilation()]),
        ]

    def determinism(self) -> Iterator[Check]:
        """Yield the rows on a second run, and on a second trace."""
        trial = self.trial(self._subject.own)
        assert self._own_copies is not None
        yield determinism(trial, self._subject.full, self._own_copies, self._steps[0].copies)
        yield self.traces(trial)

    def gradient(self) -> Iterator[Check]:
        """Yield the rows on the gradient of one device."""
        if self._facts.repeatable:
            yield from self._gradients.checks()

    def parameters(self) -> Iterator[Check]:
        """Yield rows on leaves without a gradient and leaves that the optimizer does not change."""
        subject = self._subject
        dead, stopped = dead_and_stopped(subject)
        yield from _gradients(dead, stopped, len(jax.tree.leaves(subject.state.params)))
        if self._facts.by_rank:
            yield Check("parameters", "rank", NOTE, self._facts.by_rank)
        without = [f"params{path}" for path in (*dead, *stopped)]
        trial = self.trial(subject.own)
        yield parameters(trial, subject.full, "update", of="params", without=without)

    def replicas(self, case: Case) -> Check:
        """Compare every device's own copy: of the own case after several steps, else after one."""
        trial, batches = self.trial(case), [self._subject.full]
        if case == self._subject.own:
            steps = self._steps[:_STEPS]
            batches, copies = [each.batch for each in steps], steps[-1].copies
        elif case in self._alike:
            return self._alike[case]
        else:
            copies = trial.run(batches)
        return same_on_all_replicas(trial, batches, copies, str(case))

    @functools.cached_property
    def _steps(self) -> list[Stepped]:
        """Consecutive steps of the own case: on all rows, in other orders, and with padding."""
        subject, padded = self._subject, [self._subject.padded] if self._pads else []
        batches = [subject.full, *shuffled(subject.full, _STEPS - 1), *padded]
        return consecutive(self.trial(subject.own), batches)

    def traces(self, trial: ProgramTrial) -> Check:
        """Check that tracing twice gives the same program."""
        subject, case = self._subject, trial.case
        traces = (subject.trace(case, subject.full, anew=anew).jaxpr for anew in (False, True))
        first, second = map(program_text, traces)
        if first == second:
            text = "tracing the loss again gives the same program"
            return Check("determinism", "two traces", PASS, text)
        text = "tracing the loss again gives a different program"
        return Check("determinism", "two traces", FAIL, text, TRACED)

    def recompilation(self) -> Check:
        """Check that further batches of the same shape, including a padded one, compile nothing."""
        return recompilation(self._steps, str(self._subject.own))


def _gradients(dead: list[str], stopped: list[str], count: int) -> Iterator[Check]:
    figures = {"leaves": count, "dead": dead, "stopped": stopped}
    if dead:
        text = f"{named(dead, _SHOWN)}: no gradient, and no effect on the loss"
        yield Check("parameters", "gradient", FAIL, text, DEAD, figures)
    elif not stopped:
        text = f"all {count} leaves get a gradient"
        yield Check("parameters", "gradient", PASS, text, "", figures)
    if stopped:
        text = f"{named(stopped, _SHOWN)}: frozen by stop_gradient; the loss depends on it"
        yield Check("parameters", "gradient", NOTE, text, "", figures)


def program_text(traced: Any) -> tuple[str, list[bytes]]:
    """Return a traced program without addresses, and its constants; equal for equal programs."""
    constants = [np.asarray(each).tobytes() for each in traced.consts if hasattr(each, "dtype")]
    return _ADDRESS.sub("", str(traced.jaxpr)), constants


SKIPPED = (
    "the loss or its gradient is not finite, and a run skips such a step: find what becomes NaN "
    "or infinite, also in rows of weight 0 (jax_debug_nans finds the operation)"
)
SEEDED = "give it the mean over all rows, without weights of your own, or make it linear"
PADDING_COUNTS = (
    "padding counts in what the loss, or its gradient, takes of several rows: replace it there by "
    "what changes nothing, jnp.where(real > 0, x, -jnp.inf) before a maximum or softmax, 0 before "
    "a sum; real = rx.row_weights(x)"
)
CONSTANT_KEY = (
    "a constant key: the loss draws random numbers (for example a dropout mask) that do not depend "
    "on its key argument, so every replica, micro-batch and step draws the same ones; draw from "
    "the key passed to the loss"
)
DEAD = (
    "a dead parameter: the loss does not depend on it, but it is still reduced and updated; use "
    "its layer, or remove it from the model"
)
TRACED = (
    "the loss uses a value that changes between calls and becomes a constant of the program: host "
    "random numbers (np.random, random), the time, a counter; each process would compile a "
    "different step: draw from the loss's key, or pass it in the batch"
)

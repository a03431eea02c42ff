"""Examine a loss, or a custom step, before it first runs.

Determine whether its mean over all rows can be computed from parts of them, and with padding.
"""

import contextlib
import dataclasses
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from replicax.core.data.batch import Batch
from replicax.core.first_step.examiner import (
    GATHER,
    LossRun,
    RowExaminer,
    Trace,
    trace,
    with_gradient,
)
from replicax.core.first_step.padding_trace import NOTHING_SHOWN, padding_trace
from replicax.core.first_step.row_errors import Broken
from replicax.core.first_step.row_trials import Division, Found, Pair, Tested, compared
from replicax.core.ground.train_state import TrainState
from replicax.core.jaxprs.row_causes import BACKWARD, Cause, Causes, user_line
from replicax.core.jaxprs.row_counts import FROM_STEP_KEY, GIVEN, NUMBER, Location, Ratio, Total
from replicax.core.jaxprs.row_dependence import Follow
from replicax.core.jaxprs.row_evaluation import Undecided
from replicax.core.jaxprs.row_inner import Unlike, backward_passes, calls_not_linear
from replicax.core.jaxprs.row_labels import DECLARED, ENTERED, GATHERED, LEFT, SUMMED
from replicax.core.jaxprs.row_rules import MIXED, Rows
from replicax.core.jaxprs.row_symbols import MOVING, shown_apart

UNSHOWN = "no difference was found, but the trace does not exclude one"


class LossExamination:
    """Examine a loss or a step, `run`, on the first state and batch.

    Rows are followed through two traces, with different numbers of rows. Values that may depend on
    other rows are computed, see `replicax.core.first_step.row_trials`. Raises `LossError` or
    `StateError` if a loss, or the step, violates its contract.
    """

    def __init__(
        self,
        run: LossRun,
        state: TrainState,
        batch: Batch,
        *,
        learns: bool = False,
        whole: bool = False,
    ) -> None:
        self._run, self._rows, self._whole = run, batch.size, whole
        self._given = jax.eval_shape(lambda *given: given, state, batch)
        self.one = self._traced(self._rows, self._examiner(self._rows, learns=learns))
        examiner = self.one.examiner
        self.gathers, self.weighs = examiner.gathers, examiner.weighs
        self.returns_rows, self.merges = examiner.returns_rows, examiner.merges
        self.scalars = frozenset(examiner.names[label] for label in examiner.scalars)
        """Names of outputs that a loss returns as one number for the whole batch."""
        followed = Follow((1, 1), ruled=False)
        followed(self.one.jaxpr, self.one.jaxpr, self._places(Division(np.zeros((1, 1)))))
        self.draws, self.draws_alone = followed.draws, followed.draws_alone
        """Whether random numbers are drawn by the step's key, and by another one."""
        self._twins: dict[tuple[int, bool, bool], Trace | Exception] = {}
        self._seen: dict[str, list[Location]] = {}
        self._doubting: dict[str, Follow] = {}
        self._causes: dict[Follow, dict[str, tuple[Cause, ...]]] = {}
        self._padding, self._declares = NOTHING_SHOWN, False

    @cached_property
    def moves(self) -> bool:
        """Whether the loss has a gradient that is not identically 0."""
        before = len(jax.tree.leaves((self._given[0].step, self._given[0].params)))
        return any(with_gradient(self.one.jaxpr, before))

    @cached_property
    def nonlinear(self) -> Cause | None:
        """A backward pass that is not linear, if weights divide a gradient after it."""
        found = calls_not_linear(self.one.jaxpr.jaxpr) if self.one.examiner.divides else iter(())
        return next((Cause("jax.custom_vjp", BACKWARD, user_line(eqn)) for eqn in found), None)

    @cached_property
    def takes_padding(self) -> bool:
        """Whether the traces show that padding changes nothing."""
        some = Division(np.zeros((1, self._rows // 2), int), padded=True)
        return not any(self._left_open(some, shows=False))

    @cached_property
    def is_apart(self) -> bool:
        """Whether the traces show that padding changes nothing but sums in metrics, by adding."""
        some = Division(np.zeros((1, self._rows // 2), int), padded=True)
        outputs, labels = self._doubted(some, shows=False)
        merged = self.one.examiner.merged
        added = {label for label in merged if {*self._seen[label]} <= {None, Total(0)}}
        return not outputs and added.issuperset(labels)

    @cached_property
    def gathers_draws(self) -> bool:
        """Whether gathered rows depend on random numbers that no row has for itself."""
        if not (self.gathers and self.draws):
            return False
        gathers = [label for label, name in self.one.examiner.names.items() if name == GATHER]
        twice = 2 * self._rows
        follow = Follow((self._rows, twice), {SUMMED: GIVEN, GATHERED: GIVEN}, drawn_for_all=MIXED)
        places = self._places(Division(np.zeros((1, twice))))
        with contextlib.suppress(Unlike):
            follow(self.one.jaxpr, self._twin(twice).jaxpr, places)
        return any(MIXED in follow.seen.get(label, []) for label in gathers)

    @cached_property
    def from_key(self) -> list[str]:
        """Names of outputs that depend on the step's key, which differs between replicas."""
        state, batch = self._given
        seeds = [leaf is state.seed for leaf in jax.tree.leaves(state)]
        inputs = [MIXED if each else None for each in seeds] + [None] * len(jax.tree.leaves(batch))
        jaxpr = self.one.jaxpr
        places = Follow((1, 1), {SUMMED: GIVEN})(jaxpr, jaxpr, inputs)
        return [name for name, place in zip(self.one.outputs, places, strict=False) if place]

    def proves(self, division: Division) -> bool:
        """Whether the traces show that no value of the loss differs on parts of `division`."""
        return not (self._left_open(division)[1] or self._declares)

    def doubts(self, division: Division) -> tuple[list[Broken], list[str]]:
        """Return what differs on parts of `division`, and names or labels of what may."""
        outputs, labels = self._left_open(division)
        examiner = self.one.examiner
        if division.padded and self.weighs:
            counted = [name for name in (*labels, *outputs) if self._padding.counts(name)]
            return list(map(self._broken, counted)), [*labels, *outputs]
        found = [
            dataclasses.replace(
                self._broken(name), by_row=isinstance(place, Rows) and place != MIXED
            )
            for name, place in outputs.items()
        ]
        if division.padded:
            needed = labels
            if not self.gathers:
                needed = [each for each in labels if each in examiner.scalars | examiner.merged]
            found += [self._broken(each) for each in needed]
        return found, labels

    def broken(
        self, division: Division, state: TrainState, batch: Batch, *, hands_on: bool = False
    ) -> list[Broken]:
        """Return what would differ if the parts of `division` were computed by themselves.

        `hands_on`: whether each part hands the state that a loss writes on to the next.
        """
        found, labels = self.doubts(division)
        if hands_on:
            found = [each for each in found if each.by_row or not each.output]
        if found or not labels:
            return found
        trials, why, raised = {}, "", ""
        try:
            own = [label for label in labels if label not in self.one.examiner.apart]
            trials = self.compared(division, own, state, batch)
        except Undecided as reason:
            why, raised = str(reason), str(reason.__cause__ or "") and str(reason)
        masks = division.padded and self.weighs
        for label in labels:
            trial = trials.get(label)
            differs, mixes = (trial.differs, trial.mixes) if trial else (False, False)
            if masks and trial and trial.decided and not differs:
                continue
            said = why or ("" if differs else UNSHOWN)
            by_place = differs and not mixes
            of_pairs = trial and trial.alone.shape[2:] != trial.together.shape[1:]
            pairs = trial.together.shape if trial and of_pairs else ()
            known = dataclasses.replace(self._broken(label), pairs=pairs)
            found.append(dataclasses.replace(known, by_place=by_place, why=said, raised=raised))
        return found

    def _broken(self, label: str) -> Broken:
        examiner = self.one.examiner
        return Broken(
            examiner.names.get(label, label),
            scalar=label in examiner.scalars,
            merged=label in examiner.merged,
            output=label not in examiner.names,
            summed=MIXED not in self._seen.get(label, [MIXED]),
            leaks=self._padding.leaks and label in examiner.losses,
            causes=self._causes_of(label),
        )

    def _causes_of(self, label: str) -> tuple[Cause, ...]:
        """Return which operations mixed the rows of a value that is doubted, as far as known."""
        follow = self._doubting.get(label)
        if follow is None:
            return ()
        if follow not in self._causes:
            causes = Causes(follow, self._rows)
            outputs = zip(self.one.outputs, causes(self.one.jaxpr), strict=False)
            self._causes[follow] = {**causes.seen, **dict(outputs)}
        return self._causes[follow].get(label, ())

    def tested(self, division: Division, state: TrainState, batch: Batch) -> dict[str, Tested]:
        """Return what numbers tell of each value, by name, and of rows declared independent.

        May raise `Undecided`.
        """
        _, doubted = self._left_open(division)
        names, merged = self.one.examiner.names, self.one.examiner.merged
        wanted = [label for label in names if label not in self.one.examiner.apart]
        wanted = [label for label in wanted if division.padded or label not in merged]
        declared = [DECLARED] if self._declares else []
        found = self.compared(division, [*wanted, *declared], state, batch)
        tested: dict[str, Tested] = {}
        for label, each in found.items():
            name = names.get(label, "rows declared independent")
            places = tuple(self._seen.get(label, ()))
            if name not in tested or each.differs:
                tested[name] = Tested(each, Ratio() in places, label not in doubted)
        return tested

    def compared(
        self, division: Division, labels: list[str], state: TrainState, batch: Batch
    ) -> dict[str, Found]:
        """Compute values on parts and on the whole; may raise `Undecided`."""
        batch = dataclasses.replace(batch, index=np.arange(self._rows, dtype=np.int32))
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((state, batch))):
            raise Undecided(
                "inside a transformation there are no values to decide: call dp.step on a batch "
                "before, outside of it"
            )
        try:
            part = self._twin(division.size, division.within, division.padded)
        except Unlike as unlike:
            error = unlike.__cause__
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            where = f"{division.size} of {self._rows} rows"
            raise Undecided(f"on {where}: {said}") from error
        try:
            return compared(self._pair(part, division), division, labels, state, batch)
        except jax.errors.JaxRuntimeError as error:  # such as too little memory
            raise Undecided(
                f"it cannot be computed on all rows: {error}".partition("\n")[0]
            ) from None

    def _doubted(
        self, division: Division, shows: bool = True
    ) -> tuple[dict[str, Location], list[str]]:
        """Return outputs, and labels of values, that the traces do not show to be the same.

        `shows`: whether rows that were moved are looked for, by `replicax.core.jaxprs.row_symbols`.
        """
        one = self.one
        known: dict[str, Location] = {SUMMED: GIVEN, GATHERED: MIXED if division.padded else GIVEN}
        if division.within:
            known |= {ENTERED: Rows(0), LEFT: GIVEN}
        inputs, names = self._places(division), one.examiner.names
        outputs: dict[str, Location] = {}
        labels: set[str] = set()
        # With one row, dims of size 1 may make another program: such a trace cannot decide alone.
        sizes = [division.size] if 1 < division.size < self._rows else [2 * self._rows]
        for rows in sizes + [1] * (division.size == 1):
            try:
                follow, places = self._followed(division, rows, known, inputs, shows)
                found = [label for label in names if self._doubts(label, follow, division)]
                labels.update(found)
                self._doubting |= dict.fromkeys(found, follow)
            except Unlike:
                if rows == 1:
                    continue
                # Only what is declared independent is known to be.
                mixed: dict[str, Location] = {
                    name: place and MIXED for name, place in known.items()
                }
                follow = Follow((1, 1), {**mixed, GATHERED: MIXED})
                places = follow(one.jaxpr, one.jaxpr, [each and MIXED for each in inputs])
                labels.update(() if division.within else (*one.numbers, *one.outputs))
                labels.update(label for label in names if self._doubts(label, follow, division))
            if not division.within:
                pairs = zip(one.outputs, places, strict=False)
                more = {name: place for name, place in pairs if place}
                self._doubting |= dict.fromkeys(more, follow)
                outputs |= more
            self._seen |= follow.seen
            self._declares |= follow.declares
        doubted = [label for label in (*names, *one.numbers) if label in labels]
        return outputs, [label for label in doubted if label not in outputs]

    def _left_open(
        self, division: Division, shows: bool = True
    ) -> tuple[dict[str, Location], list[str]]:
        """Return what the traces do not show to be the same, if weights of padding are 0.

        And losses with a derivative that code defines, if it may not be 0 on padding.
        """
        outputs, labels = self._doubted(division, shows)
        weighs = self.weighs and bool(outputs or labels)
        one, losses = self.one, self.one.examiner.losses
        backward = bool(losses) and any(backward_passes(one.jaxpr.jaxpr))
        if not (division.padded and (weighs or backward)):
            return outputs, labels
        rows = division.size if 1 < division.size < self._rows else 2 * self._rows
        try:
            twin, places = self._twin(rows, alone=True), self._places(division)
            counts = self._rows, rows
            found = padding_trace(one, twin, counts, self._given, places, whole=self._whole)
        except Unlike:
            self._padding = NOTHING_SHOWN
            return outputs, labels
        self._padding, numbers = found, one.examiner.scalars | one.examiner.merged
        if weighs:
            outputs = {name: found.outputs[name] for name in outputs if found.outputs[name]}
            labels = [each for each in labels if found.opens(each, scalar=each in numbers)]
        leaks = losses.difference(labels) if found.leaks else ()
        return outputs, [*labels, *sorted(leaks)]

    def _followed(
        self,
        division: Division,
        rows: int,
        known: dict[str, Location],
        inputs: list[Location],
        shows: bool,
    ) -> tuple[Follow, list[Location]]:
        """Follow rows through the traces of all and of so many `rows`; may raise `Unlike`."""
        one, twin = self.one.jaxpr, self._twin(rows, division.within, division.padded).jaxpr
        # Where a program draws for all rows at once, padding must not alter the numbers of others.
        following = partial(Follow, known=known, drawn_first=division.padded and self._whole)
        follow, back = following((self._rows, rows)), following((rows, self._rows))
        places = follow(one, twin, inputs)
        doubts = any(self._doubts(label, follow, division) for label in self.one.examiner.names)
        doubts |= not division.within and any(places[: len(self.one.outputs)])
        if not (doubts and shows and follow.mixing & MOVING and rows == division.size):
            return follow, places
        back(twin, one, inputs)
        try:
            apart = shown_apart(division.parts, self._rows, (one, twin), (follow, back))
        except Exception:  # a primitive that does not move symbols, or too little memory
            return follow, places
        follow = following((self._rows, rows), shown=apart)
        return follow, follow(one, twin, inputs)

    def _doubts(self, label: str, follow: Follow, division: Division) -> bool:
        """Whether what was followed does not show that a value is that of all rows."""
        if label in self.one.examiner.merged:
            return division.padded and any(follow.seen[label])
        if label not in self.one.examiner.scalars:
            return any(place and place != Total(0) for place in follow.seen[label])
        mean = None if division.padded else Total(-1)
        return any(place and place != mean for place in follow.seen[label])

    def _places(self, division: Division) -> list[Location]:
        state, batch = self._given
        shared = len(jax.tree.leaves((batch.shared, batch.sets)))
        rows: Location = GIVEN if division.within else Rows(0)
        by_row = [rows] * (len(jax.tree.leaves(batch)) - shared)
        origins = {id(state.seed): FROM_STEP_KEY, id(state.step): NUMBER}
        of_state: list[Location] = [origins.get(id(leaf), GIVEN) for leaf in jax.tree.leaves(state)]
        return of_state + by_row + [GIVEN] * shared

    def _examiner(self, gathered: int, **more: Any) -> RowExaminer:
        return RowExaminer(gathered, self._given[1].number, whole=self._whole, **more)

    def _traced(self, rows: int, examiner: RowExaminer) -> Trace:
        state, batch = self._given
        return trace(self._run, state, batch, rows, examiner)

    def _twin(self, rows: int, within: bool = False, alone: bool = False) -> Trace:
        """Return the trace with so many rows; `Unlike` if the user's code does not take them.

        `within`: in the losses of a custom step only. `alone`: also in what is gathered.
        """
        key = rows, within, alone and self.gathers
        if key not in self._twins:
            count = self._rows if within else rows
            gathered = rows if key[-1] else self._rows
            examiner = self._examiner(gathered, entered=rows if within else None)
            try:
                self._twins[key] = self._traced(count, examiner)
            except Exception as error:  # the user's code, on other rows
                self._twins[key] = error
        twin = self._twins[key]
        if isinstance(twin, Exception):
            raise Unlike from twin
        return twin

    def _pair(self, part: Trace, division: Division) -> Pair:
        one, counts, inputs = self.one, (self._rows, division.size), self._places(division)
        known: dict[str, Location] = {SUMMED: GIVEN}
        if division.within:
            known |= {ENTERED: Rows(0), LEFT: GIVEN}
        of_whole, of_part = Follow(counts, known), Follow(counts[::-1], known)
        try:
            of_whole(one.jaxpr, part.jaxpr, inputs)
            of_part(part.jaxpr, one.jaxpr, inputs)
        except Unlike:
            alone = Follow((1, 1), known)
            alone(one.jaxpr, one.jaxpr, inputs)
            return Pair(one, part, alone, Follow(counts), alike=False)
        return Pair(one, part, of_whole, of_part, alike=True)

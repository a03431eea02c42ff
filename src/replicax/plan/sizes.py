"""Sizes beside the requested batch: the largest one, micro-batches, and changes."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from replicax.core.data_parallel import DataParallel
from replicax.core.placement.mesh import replica_count
from replicax.core.placement.sharding_rules import Rules
from replicax.plan.advice import Wanted, alternatives
from replicax.plan.calibrated import Calibrated
from replicax.plan.largest import CLOSE_ENOUGH, MOST_ROWS, largest_rows, micro_batches
from replicax.plan.planned import LATER_PARTS, Alternative, MicroBatches, Need
from replicax.plan.steps import StepCache, holder

Changes = Mapping[str, DataParallel] | None

_LARGEST = "largest batch"


@dataclasses.dataclass(frozen=True)
class FoundSizes:
    """Sizes and alternatives found so far, and which are left."""

    left: tuple[str, ...]
    largest: Need | None = None
    too_large: Need | None = None
    micro_batches: MicroBatches | None = None
    alternatives: tuple[Alternative, ...] = ()


@dataclasses.dataclass
class Sizes:
    """The sizes and changes of a step to compare with the requested one, noting deviations."""

    dp: DataParallel
    steps: StepCache
    notes: list[str]

    def found(
        self,
        asked: Need,
        data_rows: int | None,
        changes: Changes,
        rules: Rules,
        wanted: Wanted = False,
    ) -> Iterator[FoundSizes]:
        """Yield nothing, then the largest batch with micro-batches, then alternatives too."""
        found = FoundSizes(LATER_PARTS)
        yield found
        largest, too_large = self._largest(asked, data_rows)
        known = asked if asked.fits else largest
        compiled = known is not None and known.compiled
        step = self.steps.step(self.dp, known.rows) if known is not None and compiled else None
        formula = Calibrated(self.steps, self.dp, step)
        micro = self._micro_batches(formula, asked, largest)
        found = FoundSizes(LATER_PARTS[1:], largest, too_large, micro)
        yield found
        if largest is None and too_large is not None and too_large.rows < asked.rows:
            asked = (
                too_large  # not even the smallest batch fits: look for changes with which it does
            )
        others, refused = alternatives(formula, asked, changes, rules, wanted)
        self.notes += refused
        yield dataclasses.replace(found, left=(), alternatives=others)

    def _largest(self, asked: Need, data_rows: int | None) -> tuple[Need | None, Need | None]:
        dp, capacity = self.dp, self.steps.target.chip.usable_bytes
        unit = dp.split.micro_batches
        if capacity is None:
            self.notes.append("the memory of this target is unknown, so what fits is unknown too")
            return None, None
        most = MOST_ROWS
        if data_rows is not None:
            most = max(asked.rows, min(most, data_rows // replica_count(dp.mesh)))
        fits, too_large = largest_rows(
            lambda rows: self.steps.step(dp, rows, _LARGEST).need,
            capacity,
            asked,
            self._bytes_per_row(asked, capacity, unit),
            unit,
            most,
        )
        if fits and too_large and too_large.rows > fits.rows * (1 + 2 / CLOSE_ENOUGH) + 2 * unit:
            self.notes.append(
                f"more than {fits.rows:,} rows per {holder(dp.mesh)} may fit: memory does not "
                "grow linearly, and the search reached its limit of compilations"
            )
        return fits, too_large

    def _bytes_per_row(self, asked: Need, capacity: int, unit: int) -> float:
        """Estimate by formula, from the asked rows up to rows that fill the memory.

        It is scaled to the temporaries of the compiled step. Those of one that does not fit are not
        linear: a compiler computes again what has no room.
        """
        rows = asked.rows
        least = self.steps.formula(self.dp, rows).total
        most = 2 * rows
        for _ in range(2):
            grown = self.steps.formula(self.dp, most).total - least
            slope = max(1.0, grown / (most - rows))
            full = min(int(rows + max(0, capacity - least) / slope), MOST_ROWS)
            most = max(full // unit * unit, 2 * rows)
        formula = self.steps.formula(self.dp, rows)
        if asked.fits and asked.temporaries and formula.temporaries:
            slope *= asked.temporaries / formula.temporaries
        return slope

    def _micro_batches(
        self, formula: Calibrated, asked: Need, largest: Need | None
    ) -> MicroBatches | None:
        if asked.fits or largest is None:
            return None

        def need(dp: DataParallel, rows: int) -> Need:
            told = formula.step(dp, rows)
            if told is None or told[1]:
                return self.steps.step(dp, rows, f"accumulate={dp.accumulate}").need
            return told[0].need

        fewest = math.ceil(asked.rows / largest.rows) * self.dp.accumulate
        return micro_batches(need, self.dp, asked.rows, fewest)

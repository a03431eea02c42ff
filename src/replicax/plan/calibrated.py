"""Answers by formula, scaled by one step that was compiled."""

import dataclasses
from functools import cached_property

from replicax.core.data_parallel import DataParallel
from replicax.core.placement.mesh import replica_count
from replicax.errors import ConfigError
from replicax.plan.planned import unclear
from replicax.plan.speed import speed, work
from replicax.plan.steps import StepCache, TargetStep


@dataclasses.dataclass
class Calibrated:
    """Changed steps by formula, where one compiled step tells what the formula leaves out.

    Args:
        steps: the steps of one target.
        dp: the unchanged step.
        known: it, compiled, with rows that fit: of what does not fit a compiler computes values
            again. None if there is none, or no compiler: the formula then counts as it is.
    """

    steps: StepCache
    dp: DataParallel
    known: TargetStep | None

    @cached_property
    def _larger(self) -> float:
        """The temporaries of the compiled step, relative to those by formula."""
        if self.known is None or not self.known.need.temporaries:
            return 1.0
        return self.known.need.temporaries / max(1, self.known.formula.temporaries)

    @cached_property
    def slower(self) -> float:
        """The time of the compiled step, relative to that by formula."""
        if self.known is None or self.known.compilation is None:
            return 1.0
        alone = dataclasses.replace(self.known, program=None, compilation=None)
        took, counted = (step_seconds(self.steps, step) for step in (self.known, alone))
        return took / counted if took and counted else 1.0

    def step(self, dp: DataParallel, rows: int) -> tuple[TargetStep, bool] | None:
        """Return a step by formula, and whether it is too near the limit to tell if it fits.

        The result is None if only a compiler can tell: what a device stores of split layers and
        stages, and with which kernels.
        """
        if self.steps.compiler is not None and _split(dp) != _split(self.dp):
            return None
        step, room = self.steps.by_formula(dp, rows), self.steps.target.chip.usable_bytes
        scaled = step.need.bytes + int((self._larger - 1) * step.formula.temporaries)
        least, most = sorted((scaled, step.need.bytes))
        # What a compiler saves is that of a loss.
        likely = scaled if dp.loss is self.dp.loss else step.need.bytes
        need = dataclasses.replace(step.need, bytes=likely, fits=room is None or likely <= room)
        return dataclasses.replace(step, need=need), unclear(least, most, room)


def _split(dp: DataParallel) -> int:
    """Return the devices of a replica."""
    return dp.mesh.size // replica_count(dp.mesh)


def step_seconds(steps: StepCache, step: TargetStep) -> float | None:
    """Return the lower bound on a step's time; None if it is unknown."""
    if step.program is not None and step.compilation is None:  # the compiler rejects it
        return None
    try:
        return speed(work(steps, step), steps.target, step.dp).step.seconds
    except ConfigError:  # the speed of the chip or of its links is unknown
        return None

"""The micro-batches in which a batch fits that does not fit at once."""

import math
from typing import Any

from replicax.core.data_parallel import DataParallel
from replicax.core.mesh import replica_count
from replicax.plan.need import Need
from replicax.plan.result import MicroBatches
from replicax.plan.steps import Steps, rows_of_a_replica
from replicax.plan.target import Target

_TRIES = 8
"""Each with a quarter more micro-batches than the one before."""


def micro_batches(steps: Steps, dp: DataParallel, rows: int, count: int) -> MicroBatches | None:
    """Micro-batches in which `rows` of a replica fit, about the fewest from `count` on.

    Without padding, where less than twice as many divide the rows.
    """
    for _ in range(_TRIES):
        divisors = (each for each in range(count, 2 * count) if rows % each == 0)
        count = next(divisors, count)
        if count > rows:
            break
        other = dp.replace(accumulate=count)
        need = steps.step(other, math.ceil(rows / count) * count, f"accumulate={count}").need
        if need.fits:
            return MicroBatches(count, need)
        count += max(1, count // 4)  # the sums over micro-batches take memory of their own
    return None


def at_once_and_fitting(
    dp: DataParallel, model: Any, batch: Any, rows: int, target: Target
) -> tuple[Need, MicroBatches | None]:
    """Memory that `rows` of a global batch need at once on a target, and micro-batches that fit.

    By formula, in a second: nothing is compiled. None where it fits at once, or in no number.

    Args:
        dp: the step, on a mesh of as many devices.
        model: as for `dp.init`; arrays or their shapes.
        batch: a pytree of arrays `[rows, ...]` or of their shapes, of any number of rows.
        rows: of the global batch.
        target: whose memory is told.
    """
    steps = Steps(model, batch, target, None, lambda text: None)
    at_once = steps.step(dp, rows_of_a_replica(rows, replica_count(dp.mesh), steps.unit(dp))).need
    room = steps.capacity_bytes
    if at_once.fits or room is None:
        return at_once, None
    fewest = math.ceil(at_once.bytes / room)  # the state and the sums do not become smaller
    return at_once, micro_batches(steps, dp, at_once.rows, fewest)

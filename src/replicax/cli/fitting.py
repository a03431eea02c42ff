"""The micro-batches that `replicax train` takes by itself, where a batch does not fit at once."""

from typing import Any

import replicax as rx
from replicax.cli.data import first_rows
from replicax.core.job import Job
from replicax.core.sources import PerProcess, can_shuffle
from replicax.plan.cells import line
from replicax.plan.micro_batches import at_once_and_fitting
from replicax.plan.plan import in_fit
from replicax.plan.target import attached_target
from replicax.wording import size_text


def in_micro_batches(
    dp: rx.DataParallel, model: Any, source: Any, rows: int, job: Job
) -> rx.DataParallel:
    """Return `dp` with as few micro-batches as the memory of its devices takes, by formula.

    One is left as it is: where the batch fits at once, or in no number of them; where the devices
    do not tell their memory; where looking at a row of the source would use it up. All processes
    take what the first one finds, which prints it.

    Args:
        dp: the step.
        model: as for `dp.init`.
        source: as for `dp.feed`.
        rows: of a global batch.
        job: of the processes.
    """
    count = job.broadcast("micro-batches", lambda: _count(dp, model, source, rows))
    return dp.replace(accumulate=count)


def _count(dp: rx.DataParallel, model: Any, source: Any, rows: int) -> int:
    if isinstance(source, PerProcess) or not can_shuffle(source):
        return 1
    target = attached_target(list(dp.mesh.devices.flat))
    try:
        step = in_fit(dp, model, target)
        at_once, fitting = at_once_and_fitting(step, model, first_rows(source, 1), rows, target)
    except Exception:  # the training to come says it where it belongs
        return 1
    if fitting is None:
        return 1
    count, room = fitting.accumulate, target.chip.usable_bytes
    assert room is not None, "or nothing would have been sought"
    text = (
        f"{count} micro-batches of {fitting.need.rows // count:,} rows a device: at once they "
        f"would take {size_text(at_once.bytes)} of {size_text(room)}, by formula (--accumulate)"
    )
    print(*line("parts", text), sep="\n", flush=True)
    return count

"""The largest batch of a device that fits into its memory, searched by asking the compiler."""

import math
from collections.abc import Callable
from typing import Any

from replicax.core.data_parallel import DataParallel
from replicax.plan.planned import MicroBatches, Need
from replicax.plan.steps import Steps, rows_of_a_replica
from replicax.plan.target import Target

RESOLUTION = 32
"""The largest batch is found to one part in so many, rounded down to a power of two of units."""
MOST_QUESTIONS = 12
"""A straight line seldom takes more than four."""
MOST_GROWTH = 16
"""Times the rows that fit, which the next question may be where a straight line leads to what does
not fit; and by which bytes a row are divided where memory has not grown."""
SHRINKAGE = 4
"""Times fewer rows, at least, where a straight line from what does not fit has not led to any that
do."""
MOST_ROWS = 2**24
"""Rows of a device; nobody trains with more, and XLA's index arithmetic ends not far beyond."""


def largest_rows(
    ask: Callable[[int], Need],
    capacity_bytes: int,
    start: int,
    bytes_per_row: float,
    unit: int = 1,
    most: int = MOST_ROWS,
) -> tuple[Need | None, Need | None]:
    """The most rows of one device that fit, and the fewest seen that do not.

    Memory grows by about the same for each row, so the next question is where a straight line
    meets the capacity; between what fits and what does not, once both are known. The first is None
    where not even `unit` rows fit.

    Args:
        ask: the memory of a step with as many rows.
        capacity_bytes: of one device.
        start: rows to ask for first.
        bytes_per_row: a guess at the slope, until two answers give it.
        unit: rows are multiples of it.
        most: rows to ask for.
    """
    most = max(unit, most // unit * unit)
    slope, refused = max(1.0, bytes_per_row), 0
    fits: Need | None = None
    too_large: Need | None = None

    def rounded(rows: float) -> int:
        if rows >= most:
            return most
        step = resolution(int(max(unit, rows)), unit)
        return int(max(step, rows // step * step))

    rows = max(unit, start // unit * unit)
    for _ in range(MOST_QUESTIONS):
        need = ask(rows)
        above = fits is not None and need.rows > fits.rows
        grown = (need.bytes - fits.bytes) / (need.rows - fits.rows) if fits and above else None
        if need.fits:
            if grown is not None:
                # Near the capacity a compiler may compute again, and more rows take no more memory.
                slope = max(grown if grown > 0 else slope / MOST_GROWTH, 1.0)
            fits, refused = need, 0
        else:
            if grown is not None:  # it may need more than is told
                slope = max(slope, grown)
            too_large, refused = need, refused + 1
        low = fits.rows if fits else 0
        known, step = fits or need, resolution(max(low, unit), unit)
        guess = known.rows + (capacity_bytes - known.bytes) / slope
        if too_large is None:
            if low + unit > most:
                break
            rows = rounded(max(guess, low + step))
            continue
        high = too_large.rows
        if high - low <= step:
            break
        middle = min((low + high) / 2, MOST_GROWTH * max(low, unit))
        if refused > 1:  # what is refused may need more than it says
            guess = min(guess, middle if fits else high / SHRINKAGE)
        rows = max(rounded(guess if guess < high else middle), low + step)
    return fits, too_large


def resolution(rows: int, unit: int) -> int:
    """How far apart the rows that are asked for are, at least, near `rows`."""
    return unit << max(0, (max(1, rows // unit) // RESOLUTION).bit_length() - 1)


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

    By formula, in a second: nothing is compiled. None where it fits at once, or in no number. `dp`
    is on a mesh of as many devices as the target; `batch` may have any number of rows.
    """
    steps = Steps(model, batch, target, None, lambda text: None)
    at_once = steps.step(dp, rows_of_a_replica(rows, dp)).need
    room = target.chip.usable_bytes
    if at_once.fits or room is None:
        return at_once, None
    fewest = math.ceil(at_once.bytes / room)  # the state and the sums do not become smaller
    return at_once, micro_batches(steps, dp, at_once.rows, fewest)

"""Search for the largest batch per device that fits in memory, by compiling."""

import math
from collections.abc import Callable
from typing import Any

from replicax.core.data_parallel import DataParallel
from replicax.plan.planned import FORMULA_ERROR, MicroBatches, Need
from replicax.plan.steps import StepCache, rows_of_a_replica
from replicax.plan.target import Target

RESOLUTION = 32
"""The search resolves one part in this many, rounded down to a power of two of units."""
CLOSE_ENOUGH = 8
"""The search ends with rows that fit if the line reaches the capacity less than one part in this
many further."""
MOST_QUESTIONS = 12
"""Maximum number of sizes; linear memory growth takes one beside the requested batch."""
MOST_GROWTH = 16
"""Maximum growth of the rows per question after an extrapolation that did not fit, and the divisor
of the bytes per row when memory has not grown."""
SHRINKAGE = 4
"""Minimum factor by which rows shrink while no batch has fit."""
MOST_ROWS = 2**24
"""Maximum rows per device; larger batches are unrealistic and near the limit of XLA's indices."""


def largest_rows(
    ask: Callable[[int], Need],
    capacity_bytes: int,
    asked: Need,
    bytes_per_row: float,
    unit: int = 1,
    most: int = MOST_ROWS,
) -> tuple[Need | None, Need | None]:
    """Return the largest rows per device that fit, and the fewest known not to.

    Memory is nearly linear in rows, so the next question is where a straight line meets the
    capacity, bounded by rows that fit and rows that do not once both are known. What fits was
    asked for. The second is not `compiled` if only the line says that it does not fit. The first is
    None if not even `unit` rows fit.

    Args:
        ask: returns the memory of a step with the given rows.
        capacity_bytes: memory of one device.
        asked: the memory of the requested rows, the first answer.
        bytes_per_row: an estimate of the slope, used until two answers determine it.
        unit: rows are multiples of it.
        most: maximum rows to try.
    """
    most = max(unit, most // unit * unit)
    slope, refused = max(1.0, bytes_per_row), 0
    fits: Need | None = None
    too_large: Need | None = None
    accepted, measured, steep = 0, False, False

    def rounded(rows: float) -> int:
        if rows >= most:
            return most
        step = resolution(int(max(unit, rows)), unit)
        return int(max(step, rows // step * step))

    need = asked
    for left in reversed(range(MOST_QUESTIONS)):
        above = fits is not None and need.rows > fits.rows
        grown = (need.bytes - fits.bytes) / (need.rows - fits.rows) if fits and above else None
        if need.fits:
            if grown is not None:
                # Near the capacity a compiler may rematerialize, so memory may not grow with rows.
                slope = max(grown if grown > 0 else slope / MOST_GROWTH, 1.0)
                measured = True
            fits, refused, accepted = need, 0, accepted + 1
        else:
            if grown is not None:  # it may need more than the compiler reports
                slope, steep = max(slope, grown), True  # the line to it may be much too steep
            before, too_large, refused, accepted = too_large, need, refused + 1, 0
        low = fits.rows if fits else 0
        known, step = fits or need, resolution(max(low, unit), unit)
        guess = known.rows + (capacity_bytes - known.bytes) / slope
        furthest = low + (guess - low) * (1 if measured else 1 + FORMULA_ERROR)
        close = max(step, low // CLOSE_ENOUGH) if need.compiled else step
        if fits and fits.compiled and not steep and furthest - low < close:
            following = max(rounded(furthest), low) + step
            if following <= most and (too_large is None or following < too_large.rows):
                size = int(max(capacity_bytes + 1, _on_line(fits, following, slope)))
                return fits, Need(following, size, False, False)
        if too_large is None:
            if low + unit > most:
                break
            rows = rounded(max(guess, low + step))
        else:
            high = too_large.rows
            if high - low <= close:
                break
            middle = min((low + high) / 2, MOST_GROWTH * max(low, unit))
            other = fits or before
            crossed = _crossing(too_large, other, capacity_bytes) if other else None
            if crossed is not None:  # also where a compiler rematerializes: memory grows slowly
                guess = max(crossed, middle) if accepted > 1 else crossed
                guess = max(guess, high / SHRINKAGE) if not fits else guess
            if refused > 1 and (fits or crossed is None):
                guess = min(guess, middle if fits else high / SHRINKAGE)  # more than reported
            rows = max(rounded(guess if guess < high else middle), low + step)
        if not left:
            break
        need = ask(rows if left > 1 or fits else unit)  # the last question is whether any fit
    return fits, too_large


def _on_line(known: Need, rows: int, slope: float) -> float:
    return known.bytes + slope * (rows - known.rows)


def _crossing(above: Need, other: Need, capacity_bytes: int) -> float | None:
    """Return where the line through two exact needs meets the capacity, if it grows."""
    if above.is_least or other.is_least or above.rows == other.rows:
        return None
    slope = (above.bytes - other.bytes) / (above.rows - other.rows)
    return above.rows - (above.bytes - capacity_bytes) / slope if slope > 0 else None


def resolution(rows: int, unit: int) -> int:
    """Return the minimum distance between tried row counts near `rows`."""
    return unit << max(0, (max(1, rows // unit) // RESOLUTION).bit_length() - 1)


_TRIES = 8
"""Number of tries, each with a quarter more micro-batches than the previous one."""


def micro_batches(
    need: Callable[[DataParallel, int], Need], dp: DataParallel, rows: int, count: int
) -> MicroBatches | None:
    """Find about the fewest micro-batches, from `count` up, in which a replica's `rows` fit.

    A count that divides the rows is preferred if there is one below twice as many. `need` returns
    the memory of a step with so many rows per replica.
    """
    for _ in range(_TRIES):
        divisors = (each for each in range(count, 2 * count) if rows % each == 0)
        count = next(divisors, count)
        if count > rows:
            break
        found = need(dp.replace(accumulate=count), math.ceil(rows / count) * count)
        if found.fits:
            return MicroBatches(count, found)
        count += max(1, count // 4)  # the accumulator takes memory too
    return None


def at_once_and_fitting(
    dp: DataParallel, model: Any, batch: Any, rows: int, target: Target
) -> tuple[Need, MicroBatches | None]:
    """Return the memory of a global batch of `rows` on a target, and micro-batches that fit.

    This uses the formula and takes about a second; nothing is compiled. The micro-batches are None
    if the batch fits at once, or does not fit at all. The mesh of `dp` must have as many devices as
    the target; `batch` may have any number of rows.
    """
    steps = StepCache(model, batch, target, None, lambda text: None)
    at_once = steps.step(dp, rows_of_a_replica(rows, dp)).need
    room = target.chip.usable_bytes
    if at_once.fits or room is None:
        return at_once, None
    fewest = math.ceil(at_once.bytes / room)  # the state and the accumulator do not shrink
    needed = lambda other, rows: steps.step(other, rows).need  # noqa: E731
    return at_once, micro_batches(needed, dp, at_once.rows, fewest)

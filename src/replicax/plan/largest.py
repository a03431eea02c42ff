"""Search for the largest batch per device that fits in memory, by compiling."""

import math
from collections.abc import Callable
from typing import Any

from replicax.core.data_parallel import DataParallel
from replicax.plan.planned import MicroBatches, Need
from replicax.plan.steps import StepCache, rows_of_a_replica
from replicax.plan.target import Target

FORMULA_ERROR = 0.3
"""Share by which a formula scaled to compiled steps may be wrong; the most measured is in
`docs/plan.md`."""
RESOLUTION = 32
"""The search resolves one part in this many, rounded down to a power of two of units."""
MOST_QUESTIONS = 12
"""Maximum number of compilations; linear memory growth rarely takes more than four."""
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
    start: int,
    bytes_per_row: float,
    unit: int = 1,
    most: int = MOST_ROWS,
    soon: Callable[[int], Any] = lambda rows: None,
) -> tuple[Need | None, Need | None]:
    """Return the largest rows per device that fit, and the fewest tried that do not.

    Memory is nearly linear in rows, so the next question is where a straight line meets the
    capacity, bounded by rows that fit and rows that do not once both are known. Rows that a line
    through compiled sizes puts `FORMULA_ERROR` beyond the capacity are not asked for: their `Need`
    is not `compiled`. The first result is None if not even `unit` rows fit.

    Args:
        ask: returns the memory of a step with the given rows.
        capacity_bytes: memory of one device.
        start: rows to try first.
        bytes_per_row: an estimate of the slope, used until two answers determine it.
        unit: rows are multiples of it.
        most: maximum rows to try.
        soon: called with rows that will be asked for next if the present ones fit.
    """
    most = max(unit, most // unit * unit)
    slope, refused = max(1.0, bytes_per_row), 0
    fits: Need | None = None
    too_large: Need | None = None
    accepted = 0

    def rounded(rows: float) -> int:
        if rows >= most:
            return most
        step = resolution(int(max(unit, rows)), unit)
        return int(max(step, rows // step * step))

    rows = max(unit, start // unit * unit)
    for left in reversed(range(MOST_QUESTIONS)):
        rows = rows if left or fits else unit  # the last question is whether any fit
        if fits and too_large is None and rows - fits.rows > resolution(fits.rows, unit):
            following = rows + resolution(rows, unit)
            if capacity_bytes < _on_line(fits, following, slope) < _beyond(capacity_bytes):
                soon(following)
        need = ask(rows)
        above = fits is not None and need.rows > fits.rows
        grown = (need.bytes - fits.bytes) / (need.rows - fits.rows) if fits and above else None
        if need.fits:
            if grown is not None:
                # Near the capacity a compiler may rematerialize, so memory may not grow with rows.
                slope = max(grown if grown > 0 else slope / MOST_GROWTH, 1.0)
            fits, refused, accepted = need, 0, accepted + 1
        else:
            if grown is not None:  # it may need more than the compiler reports
                slope = max(slope, grown)
            before, too_large, refused, accepted = too_large, need, refused + 1, 0
        low = fits.rows if fits else 0
        known, step = fits or need, resolution(max(low, unit), unit)
        guess = known.rows + (capacity_bytes - known.bytes) / slope
        if too_large is None:
            if low + unit > most:
                break
            rows = rounded(max(guess, low + step))
            if need.compiled and grown is not None and rows == low + step:
                beyond = _on_line(need, rows, slope)
                if beyond > _beyond(capacity_bytes):
                    return fits, Need(rows, int(beyond), False, False)
            continue
        high = too_large.rows
        if high - low <= step:
            break
        middle = min((low + high) / 2, MOST_GROWTH * max(low, unit))
        other = fits or before
        crossed = _crossing(too_large, other, capacity_bytes) if other else None
        if crossed is not None:  # also where a compiler rematerializes and memory grows slowly
            guess = max(crossed, middle) if accepted > 1 else crossed
            guess = max(guess, high / SHRINKAGE) if not fits else guess
        if refused > 1 and (fits or crossed is None):
            guess = min(guess, middle if fits else high / SHRINKAGE)  # more than reported, perhaps
        rows = max(rounded(guess if guess < high else middle), low + step)
    return fits, too_large


def _on_line(known: Need, rows: int, slope: float) -> float:
    return known.bytes + slope * (rows - known.rows)


def _beyond(capacity_bytes: int) -> float:
    return capacity_bytes * (1 + FORMULA_ERROR)


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


def micro_batches(steps: StepCache, dp: DataParallel, rows: int, count: int) -> MicroBatches | None:
    """Find about the fewest micro-batches, from `count` up, in which a replica's `rows` fit.

    A count that divides the rows is preferred if there is one below twice as many.
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
    return at_once, micro_batches(steps, dp, at_once.rows, fewest)

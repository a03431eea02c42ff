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
    search = _Search(capacity_bytes, bytes_per_row, unit, most)
    rows: int | None = max(unit, start // unit * unit)
    for _ in range(MOST_QUESTIONS):
        if rows is None:
            break
        search.add(ask(rows))
        rows = search.next()
    return search.fits, search.too_large


def resolution(rows: int, unit: int) -> int:
    """How far apart the rows that are asked for are, at least, near `rows`."""
    return unit << max(0, (max(1, rows // unit) // RESOLUTION).bit_length() - 1)


class _Search:
    def __init__(self, capacity_bytes: int, bytes_per_row: float, unit: int, most: int) -> None:
        self._capacity, self._slope, self._unit = capacity_bytes, max(1.0, bytes_per_row), unit
        self._most = max(unit, most // unit * unit)
        self.fits: Need | None = None
        self.too_large: Need | None = None
        self._refused = 0  # in a row

    def add(self, need: Need) -> None:
        before = self.fits
        if not need.fits:
            self.too_large = need
            self._refused += 1
            if before is not None:  # it may need more than is told
                self._slope = max(self._slope, _slope(before, need))
        else:
            self.fits = need
            self._refused = 0
            if before is not None and need.rows > before.rows:
                # Near the capacity a compiler may compute again, and more rows take no more memory.
                grown = _slope(before, need)
                self._slope = max(grown if grown > 0 else self._slope / MOST_GROWTH, 1.0)

    def next(self) -> int | None:
        """Rows to ask for, or None where it is found."""
        if self.fits is None:
            assert self.too_large is not None
            if self.too_large.rows <= self._unit:
                return None
            guess = self._guess(self.too_large)
            if self._refused > 1:  # what is refused may need more than it says
                guess = min(guess, self.too_large.rows / SHRINKAGE)
            return self._between(0, self.too_large.rows, guess)
        step = resolution(self.fits.rows, self._unit)
        if self.too_large is None:
            if self.fits.rows + self._unit > self._most:
                return None
            return self._rounded(max(self._guess(self.fits), self.fits.rows + step))
        if self.too_large.rows - self.fits.rows <= step:
            return None
        guess = self._guess(self.fits)
        if self._refused > 1:
            guess = min(guess, self._middle(self.fits.rows, self.too_large.rows))
        return self._between(self.fits.rows, self.too_large.rows, guess)

    def _guess(self, known: Need) -> float:
        return known.rows + (self._capacity - known.bytes) / self._slope

    def _between(self, low: int, high: int, guess: float) -> int:
        """The guess where it is strictly between; where it is above, the middle or less."""
        inside = guess if guess < high else self._middle(low, high)
        return max(self._rounded(inside), low + resolution(max(low, self._unit), self._unit))

    def _middle(self, low: int, high: int) -> float:
        return min((low + high) / 2, MOST_GROWTH * max(low, self._unit))

    def _rounded(self, rows: float) -> int:
        if rows >= self._most:
            return self._most
        step = resolution(int(max(self._unit, rows)), self._unit)
        return int(max(step, rows // step * step))


def _slope(fewer: Need, more: Need) -> float:
    return (more.bytes - fewer.bytes) / (more.rows - fewer.rows)


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

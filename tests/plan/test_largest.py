"""The search for the largest batch, with made-up memories."""

import dataclasses
import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from replicax.plan.largest import CLOSE_ENOUGH, MOST_QUESTIONS, MOST_ROWS, RESOLUTION, largest_rows
from replicax.plan.planned import Need

GB = 10**9
MB = 10**6
CAPACITY = 16 * GB
Memory = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Found:
    """Result of a search, and the sizes that it asked for."""

    fits: int | None
    too_large: int | None
    asked: list[int]


def search(
    memory: Memory,
    *,
    start: int = 8,
    guess: float = MB,
    unit: int = 1,
    told: Memory | None = None,
    exact: bool = False,
) -> Found:
    """Search on a device of 16 GB.

    Args:
        memory: bytes for so many rows.
        start: rows to try first.
        guess: bytes a row.
        unit: rows are multiples of it.
        told: the compiler's answer for rows that do not fit, if it differs from their need.
        exact: whether the compiler tells the memory of what does not fit, as one for GPUs does.
    """
    asked: list[int] = []

    def ask(rows: int) -> Need:
        asked.append(rows)
        size = math.ceil(memory(rows))
        fits = size <= CAPACITY
        if not fits and told is not None:
            size = max(CAPACITY + 1, min(size, math.ceil(told(rows))))
        return Need(rows, size, fits, True, size if exact else None)

    first = ask(max(unit, start // unit * unit))
    largest, too_large = largest_rows(ask, CAPACITY, first, guess, unit)
    assert largest is None or largest.fits
    assert too_large is None or not too_large.fits
    return Found(
        None if largest is None else largest.rows,
        None if too_large is None else too_large.rows,
        asked,
    )


def resolution(rows: int, unit: int) -> int:
    """Return the largest power of two of units up to 1/32 of the rows, or one unit."""
    step = unit
    while 2 * step * RESOLUTION <= rows:
        step *= 2
    return step


def assert_sound(found: Found, memory: Memory, unit: int) -> None:
    """Check what holds for any memory that grows with the rows."""
    assert len(set(found.asked)) == len(found.asked) <= MOST_QUESTIONS
    assert all(rows % unit == 0 and 0 < rows <= MOST_ROWS for rows in found.asked)
    fitting = [rows for rows in found.asked if memory(rows) <= CAPACITY]
    assert found.fits == max(fitting, default=None)
    refused = min(set(found.asked) - set(fitting), default=None)
    if found.too_large != refused:  # on the line beyond what fits
        assert found.too_large not in found.asked
        assert found.fits < found.too_large
        assert refused is None or found.too_large < refused
    assert (found.fits is None) == (memory(unit) > CAPACITY)


def assert_resolved(found: Found, memory: Memory, unit: int) -> None:
    if found.fits is not None:
        more = found.fits + found.fits // CLOSE_ENOUGH + 2 * resolution(found.fits, unit)
        assert more > MOST_ROWS or memory(more) > CAPACITY


@pytest.mark.parametrize("start", [8, 100_000])
def test_a_straight_line_takes_one_question_beside_the_first(start: int) -> None:
    found = search(lambda rows: 2 * GB + 10 * MB * rows, start=start, guess=10 * MB)
    # (16 - 2) GB / 10 MB = 1400 rows fit exactly. Their 32nd is 32, rounded to a power of two, of
    # which 1376 is a multiple and 1408 the next one, which no one asks for.
    assert found == Found(1376, 1408, [start, 1376])


def test_no_more_rows_are_asked_for_than_the_data_have() -> None:
    asked: list[int] = []

    def ask(rows: int) -> Need:
        asked.append(rows)
        return Need(rows, rows, True, True)

    fits, too_large = largest_rows(ask, CAPACITY, ask(64), 1.0, unit=2, most=1000)
    assert (fits.rows, too_large, max(asked)) == (1000, None, 1000)


def test_a_compiler_that_computes_again_near_the_capacity_is_not_asked_for_millions() -> None:
    def memory(rows: int) -> float:
        return GB + 500 * MB * rows if rows < 29 else 14.5 * GB + 20 * MB * (rows - 29)

    found = search(memory, start=4, guess=540 * MB)
    assert found == Found(28, 31, [4, 28])


def test_where_a_compiler_computes_again_exact_answers_cross_the_capacity() -> None:
    def memory(rows: int) -> float:
        return 2 * GB + 500 * MB * rows if rows < 26 else 15 * GB + 30 * MB * (rows - 26)

    found = search(memory, start=64, guess=500 * MB, exact=True)
    assert (found.fits, found.too_large) == (59, 60)
    assert len(found.asked) <= 5


def test_rows_near_the_capacity_take_no_question() -> None:
    found = search(lambda rows: 100 * MB * rows, start=150, guess=100 * MB)
    assert found == Found(150, 164, [150])  # the slope may be 30% less


@pytest.mark.parametrize(
    "memory",
    [
        lambda rows: GB + 10 * MB * rows**0.5,
        lambda rows: GB + 10 * MB * rows**2.0,
        lambda rows: 2 * GB + 2 * GB * (rows // 100),
    ],
    ids=["root", "square", "steps"],
)
def test_what_is_no_straight_line(memory: Memory) -> None:
    found = search(memory)
    assert_sound(found, memory, 1)
    assert_resolved(found, memory, 1)


@pytest.mark.parametrize("most", [1, 3, 50, 1400])
@pytest.mark.parametrize("start", [8, 1000, 50_000])
@pytest.mark.parametrize(
    "told", [lambda rows: 0, lambda rows: 0.8 * rows * 10 * MB], ids=["hardly more", "80 %"]
)
@pytest.mark.parametrize("wrong", [1.0, 0.1])
def test_a_compiler_that_tells_too_little_does_not_hide_what_fits(
    told: Memory, start: int, most: int, wrong: float
) -> None:
    def memory(rows: int) -> float:
        return CAPACITY * rows / most

    found = search(memory, start=start, guess=wrong * CAPACITY / most, told=told)
    assert_sound(found, memory, 1)
    assert found.fits is not None
    assert most - max(resolution(most, 1), most // CLOSE_ENOUGH) < found.fits <= most


UNITS = st.sampled_from([1, 2, 3, 7, 8, 64])
STARTS = st.integers(1, 50_000)
WRONG = st.floats(1e-3, 1e3)
"""Guess of the slope, as a multiple of it."""


@settings(max_examples=500, deadline=None)
@given(
    fixed=st.floats(0, 20 * GB),
    slope=st.floats(1.0, 10 * GB),
    wrong=st.floats(0.5, 1.3),
    start=STARTS,
    unit=UNITS,
)
def test_any_straight_line(fixed: float, slope: float, wrong: float, start: int, unit: int) -> None:
    def memory(rows: int) -> float:
        return math.ceil(fixed + slope * rows)

    found = search(memory, start=start, guess=wrong * slope, unit=unit)
    assert_sound(found, memory, unit)
    assert_resolved(found, memory, unit)
    assert found.too_large is None or memory(found.too_large) > CAPACITY


@pytest.mark.promise("plan.largest-batch")
@settings(max_examples=500, deadline=None)
@example(0.0, 206801080.0, 1.75, 1, 854.0, 2651, 1, None, True)  # 13 questions from above
@given(
    fixed=st.floats(0, 20 * GB),
    slope=st.floats(1.0, 10 * GB),
    power=st.floats(0.4, 2.2),
    stair=st.integers(1, 300),
    wrong=WRONG,
    start=STARTS,
    unit=UNITS,
    told=st.sampled_from([None, 0.0, 0.8]),
    exact=st.booleans(),
)
def test_any_memory_that_grows(
    fixed: float,
    slope: float,
    power: float,
    stair: int,
    wrong: float,
    start: int,
    unit: int,
    told: float | None,
    exact: bool,
) -> None:
    def memory(rows: int) -> float:
        return math.ceil(fixed + slope * (rows // stair * stair) ** power)

    said = None if told is None else lambda rows: told * memory(rows)
    found = search(
        memory, start=start, guess=wrong * slope, unit=unit, told=said, exact=exact and not told
    )
    assert_sound(found, memory, unit)

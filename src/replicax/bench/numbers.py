"""Repeated timings, and numbers as text, short enough for a table."""

import math
from collections.abc import Sequence

import numpy as np

UNKNOWN = "-"


def digits(value: float) -> str:
    """At most 7 characters: counts in full, else three significant digits."""
    if value < 999_999.5:
        return f"{value:,.{0 if isinstance(value, int) else _decimals(value)}f}"
    for unit, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if value < 999.95 * size:
            return f"{value / size:.{3 if value < 9.9995 * size else 1}f}{unit}"
    return f"{value:.0e}"


def around(values: Sequence[float]) -> str:
    """The median, and half of what the quartiles are apart, in the median's digits."""
    middle, low, high = spread(values)
    half = (high - low) / 2
    if middle >= 99_999.5:
        return f"{digits(middle)} ± {digits(half)}"
    decimals = _decimals(middle)
    return f"{middle:,.{decimals}f} ± {half:,.{decimals}f}"


def percent(value: float | None) -> str:
    """A share."""
    return UNKNOWN if value is None else f"{value:.0%}"


def percent_around(values: Sequence[float]) -> str:
    """The median share, and half of what the quartiles are apart."""
    middle, low, high = spread(values)
    # The fewest devices are compared with themselves.
    return percent(middle) if low == high else f"{middle:.0%} ± {100 * (high - low) / 2:.0f}"


def mebibytes(count: int | None) -> str:
    """Bytes of memory in MiB."""
    return UNKNOWN if count is None else digits(count / 2**20)


def _decimals(value: float) -> int:
    """Decimals that give three significant digits, at most 4."""
    return min(max(2 - math.floor(math.log10(value)), 0), 4) if value > 0 else 0


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the quartiles around it, none beyond what was measured."""
    middle, low, high = np.quantile(values, (0.5, 0.25, 0.75)).tolist()
    return middle, low, high


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Round by round, so that what disturbs a round disturbs both sides."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]

"""Statistics of repeated timings, and short text for numbers in tables."""

import math
from collections.abc import Sequence

import numpy as np

UNKNOWN = "-"


def digits(value: float) -> str:
    """Format in at most 7 characters: counts in full, floats with three significant digits."""
    if value < 999_999.5:
        return f"{value:,.{0 if isinstance(value, int) else _decimals(value)}f}"
    for unit, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if value < 999.95 * size:
            return f"{value / size:.{3 if value < 9.9995 * size else 1}f}{unit}"
    return f"{value:.0e}"


def around(values: Sequence[float]) -> str:
    """Format the median ± half the interquartile range, with the median's decimals."""
    middle, low, high = spread(values)
    half = (high - low) / 2
    if middle >= 99_999.5:
        return f"{digits(middle)} ± {digits(half)}"
    decimals = _decimals(middle)
    return f"{middle:,.{decimals}f} ± {half:,.{decimals}f}"


def percent(value: float | None) -> str:
    """Format a share."""
    return UNKNOWN if value is None else f"{value:.0%}"


def percent_around(values: Sequence[float]) -> str:
    """Format the median share ± half the interquartile range."""
    middle, low, high = spread(values)
    # The baseline is compared with itself.
    return percent(middle) if low == high else f"{middle:.0%} ± {100 * (high - low) / 2:.0f}"


def mebibytes(count: int | None) -> str:
    """Format a number of bytes in MiB."""
    return UNKNOWN if count is None else digits(count / 2**20)


def _decimals(value: float) -> int:
    """Return the decimals for three significant digits, at most 4."""
    return min(max(2 - math.floor(math.log10(value)), 0), 4) if value > 0 else 0


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the lower and the upper quartile, within the measured range."""
    middle, low, high = np.quantile(values, (0.5, 0.25, 0.75)).tolist()
    return middle, low, high


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Divide round by round, so that a disturbance of a round affects both sides."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]

"""Repeated timings, and numbers as text, short enough for a table."""

import math
import statistics
from collections.abc import Sequence

UNKNOWN = "-"


def digits(value: float) -> str:
    """Three significant digits, without an exponent where the value is below a million."""
    if value >= 1e6:
        return short(value)
    return f"{value:,.{_decimals(value)}f}"


def short(value: float) -> str:
    """A count in at most 7 characters."""
    if value < 999_999.5:
        return f"{value:,.0f}" if value >= 99.95 or value == int(value) else digits(value)
    for unit, size in (("M", 1e6), ("G", 1e9), ("T", 1e12)):
        if value < 999.95 * size:
            return f"{value / size:.{3 if value < 9.9995 * size else 1}f}{unit}"
    return f"{value:.0e}"


def hundredths(seconds: float) -> str:
    """Seconds with two decimals, as long as these matter."""
    return f"{seconds:.2f}" if seconds < 100 else short(seconds)


def around(values: Sequence[float]) -> str:
    """The median, and half of what the quartiles are apart, in the median's digits."""
    middle, low, high = spread(values)
    half = (high - low) / 2
    if middle >= 99_999.5:
        return f"{short(middle)} ± {short(half)}"
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


def traffic(count: int) -> str:
    """Bytes in powers of ten, as networks have them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return f"{digits(count / size)} {unit}"
    return f"{count} B"


def _decimals(value: float) -> int:
    """Decimals that give three significant digits, at most 4."""
    if value <= 0:
        return 0
    return min(max(2 - math.floor(math.log10(value)), 0), 4)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the quartiles around it, none beyond what was measured."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Round by round, so that what disturbs a round disturbs both sides."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]

"""Statistics of repeated timings, and their text."""

from collections.abc import Sequence

import numpy as np

from replicax.text.wording import decimals, number_text, percent


def around(values: Sequence[float]) -> str:
    """Format the median ± half the interquartile range, with the median's decimals."""
    middle, low, high = spread(values)
    half = (high - low) / 2
    if middle >= 99_999.5:
        return f"{number_text(middle)} ± {number_text(half)}"
    places = decimals(middle)
    return f"{middle:,.{places}f} ± {half:,.{places}f}"


def percent_around(values: Sequence[float]) -> str:
    """Format the median share ± half the interquartile range."""
    middle, low, high = spread(values)
    # The baseline is compared with itself.
    return percent(middle) if low == high else f"{middle:.0%} ± {100 * (high - low) / 2:.0f}"


def is_noise(efficiency: Sequence[float]) -> bool:
    """Whether the median would be printed as more than 100%, which no device adds."""
    return round(spread(efficiency)[0], 2) > 1


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, the lower and the upper quartile, within the measured range."""
    middle, low, high = np.quantile(values, (0.5, 0.25, 0.75)).tolist()
    return middle, low, high


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Divide round by round, so that a disturbance of a round affects both sides."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]

"""What to make of repeated timings, and the header that every result carries."""

import datetime
import importlib.metadata
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicax.bench.cores import core_count

PACKAGES = ("replicax", "jax", "jaxlib", "numpy", "optax")


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, and the quartiles around it, none beyond what was measured."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def ratios(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Round by round, so that what disturbs a round disturbs both sides."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def environment() -> dict[str, Any]:
    """Date, hardware and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": core_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # no Linux
        return platform.processor() or platform.machine()
    models = [line for line in text.splitlines() if line.startswith("model name")]
    return models[0].partition(":")[2].strip() if models else platform.machine()

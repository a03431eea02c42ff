"""Interleaved timing, and the header that every result carries."""

import datetime
import importlib.metadata
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def interleaved(
    runs: Mapping[str, Callable[[], None]], rounds: int, warmups: int = 2
) -> dict[str, list[float]]:
    """Seconds of each run in each round. Every round runs them all, in an order of its own."""
    names = list(runs)
    for _ in range(warmups):
        for name in names:
            runs[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            started = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - started)
    return seconds


def spread(values: list[float]) -> tuple[float, float, float]:
    """Median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(values, n=4)
    return middle, low, high


def ratios(numerator: list[float], denominator: list[float]) -> list[float]:
    """Round by round, so that what disturbs a round disturbs both sides."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def environment() -> dict[str, Any]:
    """Date, hardware and versions."""
    packages = ("jax", "jaxlib", "numpy", "optax")
    return {
        "date": datetime.date.today().isoformat(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in packages},
    }


def save(name: str, result: dict[str, Any]) -> Path:
    """Write `results/<name>.json`."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()

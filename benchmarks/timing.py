"""Interleaved timing, and saving of results."""

import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from replicax.bench.machine import environment as environment
from replicax.bench.numbers import ratios as ratios
from replicax.bench.numbers import spread as spread

RESULTS = Path(__file__).parent / "results"


def interleaved(
    runs: Mapping[str, Callable[[], None]], rounds: int, warmups: int = 2
) -> dict[str, list[float]]:
    """Return the seconds of each run in each round. Every round runs all in random order."""
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


def save(name: str, result: dict[str, Any]) -> Path:
    """Write `results/<name>.json`."""
    path = RESULTS / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return path

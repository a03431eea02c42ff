"""Shared by the parts of `gpu.py`: how they answer, how they take time, and the chip they are on.

A part is a script of its own: it prints one line of JSON, its figures by name, each name with its
unit. Or `left_out` with the reason, where the machine lacks what it needs; or `error`.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from replicax.analysis.hardware import CHIPS, Chip, chip_of_kind
from replicax.wording import first_line


class LeftOutError(Exception):
    """The machine lacks what the part needs; says what that is."""


def answer(
    measure: Callable[[argparse.Namespace], dict[str, Any]], parser: argparse.ArgumentParser
) -> None:
    """Print what `measure` finds with the options of the command line; exit with 1 if it fails."""
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args()
    try:
        found = measure(args)
    except LeftOutError as reason:
        found = {"left_out": str(reason)}
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        found = {"error": first_line(error)}
    print(json.dumps(found))
    sys.exit("error" in found)


def options(description: str | None) -> argparse.ArgumentParser:
    """A parser with the first line of a module's docstring."""
    return argparse.ArgumentParser(description=(description or "").splitlines()[0])


def seconds_a_step(steps: Callable[[int], Any], count: int, rounds: int = 7) -> list[float]:
    """Seconds a step in each round of so many. `steps(count)` comes back when they are done."""
    steps(2)
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        steps(count)
        found.append((time.perf_counter() - started) / count)
    return found


def chip(tiny: bool) -> Chip | None:
    """The chip of the first device; a tiny run reckons with an H200, so that all is tried."""
    found = chip_of_kind(jax.devices()[0].device_kind)
    return CHIPS["h200"] if tiny else found


def peak_memory_gb() -> float | None:
    """The most that has been in use on the first device; None where it does not tell."""
    stats = jax.devices()[0].memory_stats() or {}
    found = stats.get("peak_bytes_in_use")
    return None if found is None else round(found / 1e9, 3)

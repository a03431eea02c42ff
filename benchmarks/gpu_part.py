"""Helpers for the parts of `gpu.py`: output, timing, and the chip.

A part is a separate script that prints one line of JSON with figures by name, including the unit;
or `left_out` with the reason, if the machine lacks a requirement; or `error`.
"""

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from replicax.analysis.hardware import CHIPS, Chip, chip_of_kind
from replicax.text.wording import first_line


class LeftOutError(Exception):
    """Raised with the reason if the machine lacks a requirement of the part."""


def answer(
    measure: Callable[[argparse.Namespace], dict[str, Any]], parser: argparse.ArgumentParser
) -> None:
    """Print the result of `measure` with the command-line options; exit with 1 if it fails."""
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


def last_answer(command: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a part in a process of its own, and return its figures; raise if it fails."""
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    if done.returncode or not found:
        raise RuntimeError(found.get("error", f"a process exited with {done.returncode}"))
    return found


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser described by the first line of a module's docstring."""
    return argparse.ArgumentParser(description=(description or "").splitlines()[0])


def seconds_a_step(steps: Callable[[int], Any], count: int, rounds: int = 7) -> list[float]:
    """Return the seconds per step in each round. `steps(count)` must block until it is done."""
    steps(2)
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        steps(count)
        found.append((time.perf_counter() - started) / count)
    return found


def chip(tiny: bool) -> Chip | None:
    """Return the chip of the first device; tiny runs assume an H100, to exercise all code."""
    found = chip_of_kind(jax.devices()[0].device_kind)
    return CHIPS["h100"] if tiny else found


def peak_memory_gb() -> float | None:
    """Return the peak memory of the first device; None if it does not report it."""
    stats = jax.devices()[0].memory_stats() or {}
    found = stats.get("peak_bytes_in_use")
    return None if found is None else round(found / 1e9, 3)

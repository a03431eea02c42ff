"""Overhead of a step over the same hand-written JAX step, as in overhead.py, on one device."""

import argparse
from typing import Any

from gpu_part import answer, options
from overhead import lenet, tiny


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the medians of the parts of overhead.py that do not need Flax."""
    network, line = lenet(1, 3 if args.tiny else 60), tiny(2 if args.tiny else 15)
    found: dict[str, Any] = {}
    for name, values in network["milliseconds_per_step"].items():
        found[f"LeNet, {name}, ms"] = values[0]
    for mode, values in network["ratio"].items():
        found[f"LeNet, {mode}, ratio to by hand"] = values[0]
    for name, values in line["microseconds_per_step"].items():
        found[f"two parameters, {name}, us"] = values[0]
    found["two parameters, over plain jit, us"] = line["over_plain_jit"][0]
    return found


if __name__ == "__main__":
    answer(measure, options(__doc__))

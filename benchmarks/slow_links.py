"""Methods over links of 100 Mbit/s and 1 Gbit/s, between 2 and 4 islands: `bench --network`.

A GPT of 3.2 million parameters with one row of 32 tokens for each island takes 8.1 ns a parameter
for a step on one core of an AMD EPYC, as GPT-2 124M in 1 s. Four islands on two cores take twice as
long. The rows of a batch are as many as the islands, so each count is a command of its own.

Goal: utilization of at least 85% (int4 every 30 steps) and 95% (sparse), and a forecast within 5
points. Writes `results/slow_links.json`, with the load of the machine around each command.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from timing import save

NETWORKS, ISLANDS = ("100Mbit", "1Gbit"), (2, 4)
MODEL = ["gpt2", "--layers", "4", "--width", "256", "--context", "32"]
POINTS = 5.0
GOALS = {"rounds-int4": 0.85, "rounds-sparse": 0.95}


def measure(network: str, islands: int, rounds: int, more: list[str]) -> dict[str, Any]:
    """Return the result of one command, whose table is printed."""
    load = os.getloadavg()[0]
    flags = ["--network", network, "--islands", str(islands), "--batch-size", str(islands)]
    command = [sys.executable, "-m", "replicax", "bench", *MODEL, *flags, "--run", "x"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, "--rounds", str(rounds), *more], cwd=folder, check=True)
        found: dict[str, Any] = json.loads((Path(folder) / "runs/x/bench.json").read_text())
    return {**found, "load_before": load, "load_after": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--islands", nargs="+", type=int, default=ISLANDS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="slow_links")
    args, more = parser.parse_known_args()
    found = [
        measure(network, islands, args.rounds, more)
        for network in args.networks
        for islands in args.islands
    ]
    print(f"see {save(args.name, {'model': MODEL, 'measured': found})}")
    for each in found:
        for case in each["cases"]:
            name, middle = case["method"]["name"], case["median_and_quartiles"][0]
            apart = case["points_apart"], case["points_apart_with_own"]
            missed = ["utilization"] * (middle < GOALS.get(name, 0))
            missed += ["forecast"] * (abs(apart[0]) > POINTS)
            missed += ["forecast with own work"] * (abs(apart[1]) > POINTS)
            if missed:
                where = f"{each['network']}, {case['islands']} islands, {name}"
                print(f"{where}: {middle:.1%}, missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()

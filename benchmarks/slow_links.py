"""Methods side by side between islands on this host, whose links have a limited rate.

    python benchmarks/slow_links.py --networks 100Mbit --islands 2 --methods rounds-int4 --every 100

Each island is a process on CPU cores of its own, as far as there are enough, and trains a GPT on
one row of 32 tokens. One of 3.2 million parameters takes 8.1 ns a parameter for a step on one core
of an AMD EPYC, as GPT-2 124M in 1 s. Four islands on two cores take twice as long.

Goal: utilization of at least 85% (int4 every 30 steps) and 95% (sparse), and a forecast within 5
points. Writes `results/NAME.json`, with the load of the machine around each measurement, and
`results/NAME-*.png`.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from slow_links_bench import bench_links
from slow_links_methods import METHOD_NAMES, link_methods
from slow_links_report import draw_links, link_json, link_table
from timing import RESULTS, save

from replicax.errors import ConfigError
from replicax.launch.compiled_folder import compiled_folder
from replicax.plan.site_network import parse_network
from replicax.plan.slow_links import forecast

ISLAND = Path(__file__).with_name("slow_links_island.py")
POINTS = 5.0
GOALS = {"rounds-int4": 0.85, "rounds-sparse": 0.95}


def measure(network: str, islands: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the result of one network and number of islands, whose table is printed."""
    sites, known = parse_network(network), link_methods(args.every)
    settings = json.dumps({"every": args.every, "layers": args.layers, "width": args.width})

    def expected(method: Any, arrays: Any, step_seconds: float) -> float:
        found = forecast(arrays, step_seconds, islands, sites, method.schedule).utilization
        assert found is not None
        return found

    load = os.getloadavg()[0]
    with compiled_folder() as cache, tempfile.TemporaryDirectory() as logs:
        # All methods have the same inner step: it is compiled once.
        os.environ |= {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        found = bench_links(
            [sys.executable, str(ISLAND), settings],
            islands,
            network,
            sites.links[""].bytes_per_second,
            [known[name] for name in args.methods],
            expected,
            logs=Path(logs),
            repetitions=args.rounds,
            relay=args.relay,
        )
    print(*link_table(found), sep="\n", flush=True)
    if not args.dry:
        draw_links(found, RESULTS / f"{args.name}-{network}-{islands}.png")
    return {**link_json(found), "load_before": load, "load_after": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="+", default=["100Mbit", "1Gbit"], help="rates")
    parser.add_argument("--islands", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--methods", nargs="+", default=METHOD_NAMES, choices=METHOD_NAMES)
    parser.add_argument("--every", type=int, default=30, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--relay", action="store_true", help="a relay, even where tc is permitted")
    parser.add_argument("--name", default="slow_links")
    parser.add_argument("--dry", action="store_true", help="write no file")
    args = parser.parse_args()
    if args.every < 2:
        parser.error(f"--every {args.every}; a round has at least 2 steps: raise it")
    if min(args.islands) < 2:
        parser.error(f"--islands {min(args.islands)}; it takes at least 2 to exchange: raise it")
    for network in args.networks:
        try:
            link = parse_network(network).links.get("")
        except ConfigError as error:
            parser.error(str(error))
        if link is None or link.round_trip_seconds:
            what = "links of pairs of sites" if link is None else "a round trip"
            parser.error(
                f"--networks {network!r} has {what}; only one rate is limited: write 1Gbit"
            )
    found = [
        measure(network, islands, args) for network in args.networks for islands in args.islands
    ]
    if not args.dry:
        print(f"see {save(args.name, {'measured': found})}")
    for each in found:
        for case in each["cases"]:
            name, middle = case["method"]["name"], case["median_and_quartiles"][0]
            apart = case["points_apart"], case["points_apart_with_own"]
            missed = ["utilization"] * (middle < GOALS.get(name, 0))
            missed += ["forecast"] * (abs(apart[0]) > POINTS)
            missed += ["forecast with own work"] * (abs(apart[1]) > POINTS)
            if missed:
                where = f"{each['network']}, {each['islands']} islands, {name}"
                print(f"{where}: {middle:.1%}, missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()

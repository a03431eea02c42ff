"""Disturb small training runs with every kind of fault, and check that nobody can tell.

    python tests/chaos/chaos.py --faults kill --trials 40 --seed 7
    python tests/chaos/chaos.py --trials 1000 --jobs 3 --json trials.json
    python tests/chaos/chaos.py --without verification
    python tests/chaos/chaos.py --islands --json benchmarks/results/islands_faults.json
    python tests/chaos/chaos.py --islands --rounds --faults kill,freeze
    python tests/chaos/chaos.py --islands --differing --trials 300

Trial i has the seed SEED + i, which determines all else: `--faults F --seed S --trials 1` repeats
one. Only times differ.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # otherwise `chaos` would be `chaos.py` in this file's folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from chaos.disk import can_mount
from chaos.harness import Harness
from chaos.islands.differing import DifferingHarness
from chaos.islands.differing_job import DIFFERENCES
from chaos.islands.faults import FAULTS as ISLAND_FAULTS
from chaos.islands.harness import IslandsHarness
from chaos.islands.rounds import ROUND_FAULTS
from chaos.results import table
from chaos.runs.defences import DEFENCES
from chaos.runs.faults import FAULTS
from chaos.runs.harness import RunsHarness

_USUAL_TRIALS = 40
_DISK, _NO_DISK = "on a real tmpfs", "injected, as nothing can be mounted here"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parse(arguments)
    began = time.monotonic()
    if not options.islands:
        print(f"disk-full, read-only: {_DISK if can_mount() else _NO_DISK}; io-error: injected")
    print(f"chaos {options.trials} trials, {', '.join(options.faults)}, seed {options.seed}")
    with _harness(options) as harness:
        outcomes = harness.run(
            options.faults, options.trials, options.seed, options.jobs, options.without
        )
    seconds, count = time.monotonic() - began, len(outcomes)
    print("\n".join(table(outcomes)))
    failed = sum(bool(outcome.wrong) for outcome in outcomes)
    equal = sum(outcome.equal for outcome in outcomes)
    starts = sum(outcome.starts for outcome in outcomes)
    each = sum(outcome.cpu_seconds for outcome in outcomes) / count
    print(
        f"{count} trials, {failed} failed, {equal} with the bits of {harness.whose}, "
        f"{starts} starts; {seconds:.0f} s, {seconds / count:.2f} s and {each:.2f} CPU seconds "
        "a trial"
    )
    if options.json and (options.differing or not options.islands):
        told = [dataclasses.asdict(outcome) for outcome in outcomes]
        options.json.write_text(json.dumps({"seconds": seconds, "trials": told}, indent=1) + "\n")
    if options.without:
        verdict = "was missed" if failed else "was NOT missed: no trial needs it"
        print(f"without {options.without}: {verdict}")
        return 0 if failed else 1
    return 1 if failed else 0


def _harness(options: argparse.Namespace) -> Harness:
    if options.differing:
        return DifferingHarness()
    if options.islands:
        return IslandsHarness(options.json, rounds=options.rounds)
    return RunsHarness(processes=options.processes)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chaos.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{_listed('faults', FAULTS)}\n{_listed('faults of islands', ROUND_FAULTS)}",
    )
    parser.add_argument("--islands", action="store_true", help="runs of several islands")
    parser.add_argument("--rounds", action="store_true", help="several steps between exchanges")
    parser.add_argument("--differing", action="store_true", help="an island differs in one thing")
    parser.add_argument("--faults", "--fault", help="kinds, by commas; all by default")
    parser.add_argument("--trials", type=int, help="40; of islands, twice the number of kinds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, help="of each run; 1 to 4 by default")
    parser.add_argument("--jobs", type=int, help="trials at a time: 2; of islands, 1")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="for the outcomes; those of islands are added"
    )
    parser.add_argument(
        "--without", choices=DEFENCES, help="switch a defence off; then a trial must fail"
    )
    options = parser.parse_args(arguments)
    if options.differing and not options.islands:
        parser.error("--differing is of --islands")
    if options.rounds and not options.islands:
        parser.error("--rounds is of --islands")
    if options.islands and (options.processes or options.without):
        parser.error("--processes and --without are not of --islands")
    known: Mapping[str, Any] = FAULTS
    if options.islands:
        known = ROUND_FAULTS if options.rounds else ISLAND_FAULTS
        known = DIFFERENCES if options.differing else known
    usual = DEFENCES[options.without].fault if options.without else ",".join(known)
    options.faults = (options.faults or usual).split(",")
    for name in set(options.faults) - set(known):
        parser.error(f"no fault {name!r}; there are {', '.join(known)}")
    if options.trials is None:
        options.trials = 2 * len(options.faults) if options.islands else _USUAL_TRIALS
    if options.jobs is None:
        options.jobs = 1 if options.islands else 2
    if min(options.trials, options.jobs, options.processes or 1) < 1:
        parser.error("--trials, --jobs and --processes count from 1")
    return options


def _listed(title: str, faults: Mapping[str, Any]) -> str:
    lines = [f"  {name:16}{fault.what}" for name, fault in faults.items()]
    return "\n".join([f"{title}:", *lines])


if __name__ == "__main__":
    sys.exit(main())

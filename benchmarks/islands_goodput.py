"""Rows per second of islands whose processes are killed, beside a job restarted from checkpoints.

Three islands under `replicax launch --islands 3`, and the same program as one job under
`replicax launch --processes 3 --restarts 1000000`, train GPT `nano` for a number of steps and save
a checkpoint every 10 seconds. From the first step on, `kill -9` hits a random one of the three, at
a random time in each of equal intervals, at the same times in both. Goodput is the undisturbed
seconds of the same kind over the seconds that the run takes; a run that takes too long is cut off,
and its share of the steps counts. Writes `results/islands_goodput.json` and
`docs/images/islands_goodput.png`.
"""

import argparse
import itertools
import math
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from islands_runs import COUNT, IMAGES, POLL_SECONDS, STARTS_WITHIN_SECONDS, LaunchedRun
from timing import environment, save

from replicax.bench.machine import Neighbours
from replicax.bench.plots import STYLES
from replicax.text.plot_style import picture

RATES = 0.0, 30.0, 60.0, 125.0, 250.0
"""Faults an hour."""
STEPS = 1000
KINDS = {"islands": "islands", "restart": "one job, restarted from its checkpoint"}
PICTURE = IMAGES / "islands_goodput.png"
TOLD_SECONDS = 10.0


def main() -> None:
    args = arguments()
    neighbours, where = Neighbours(), environment()
    kinds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in args.kinds}
    for rate in args.rates:
        for kind, runs in kinds.items():
            undisturbed = runs[0] if runs else None
            longest = args.most * (undisturbed["seconds"] if undisturbed else 3600.0)
            runs.append(measure(kind, rate, longest, args))
            rows = runs[-1]["rows_per_second"]
            runs[-1]["goodput"] = rows / runs[0]["rows_per_second"]
            print(
                f"{kind}, {rate:g} faults an hour: goodput {runs[-1]['goodput']:.1%}, "
                f"{rows:.1f} rows/s, {runs[-1]['kills']} kills in {runs[-1]['seconds']:.0f} s",
                flush=True,
            )
        where["other_processes_used_cores"] = neighbours.cores()
        result = {"environment": where, "settings": vars(args) | {"out": None}, **kinds}
        if not args.quick:
            save("islands_goodput", result)
        draw(kinds, args.out)
    print(f"see {args.out}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", type=float, help=f"0 comes first {RATES}")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--mode", default="jit", help="(jit)")
    parser.add_argument("--steps", type=int, help=f"of each run ({STEPS})")
    parser.add_argument("--rows", type=int, default=24, help="of a batch (24)")
    parser.add_argument("--save-seconds", type=float, default=10.0, help="between checkpoints (10)")
    parser.add_argument(
        "--most", type=float, default=3.0, help="longest run, in undisturbed runs (3)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the faults (0)")
    parser.add_argument("--out", type=Path, default=PICTURE, help="the picture")
    parser.add_argument(
        "--quick", action="store_true", help="a trial of 120 steps at 0 and 250 faults; no JSON"
    )
    args = parser.parse_args()
    if args.quick:
        args.rates, args.steps = args.rates or (0.0, 250.0), args.steps or 120
        if args.out == PICTURE:
            args.out = Path(tempfile.gettempdir()) / PICTURE.name
    args.rates, args.steps = args.rates or RATES, args.steps or STEPS
    if args.rates[0] != 0:
        parser.error(f"--rates {args.rates[0]:g} first; all are relative to 0 faults: begin with 0")
    return args


def measure(kind: str, rate: float, longest: float, args: argparse.Namespace) -> dict[str, Any]:
    """Run all steps with so many faults an hour; return what came of it."""
    drawn = random.Random(f"{args.seed} {rate}")
    with tempfile.TemporaryDirectory(prefix="replicax-goodput-", ignore_cleanup_errors=True) as at:
        run = LaunchedRun(
            Path(at),
            islands=kind == "islands",
            steps=args.steps,
            rows=args.rows,
            save_seconds=args.save_seconds,
            mode=args.mode,
        )
        try:
            run.wait(lambda: bool(run.newest()), "first step", STARTS_WITHIN_SECONDS)
            missed = disturb(run, kind, rate, longest, args.steps, drawn)
            ended = time.time()
        finally:
            run.close()
        return {"faults_per_hour": rate, **summary(run, args.steps, args.rows, missed, ended)}


def disturb(
    run: LaunchedRun, kind: str, rate: float, longest: float, steps: int, drawn: random.Random
) -> int:
    """Kill until all steps are done or time is up; return how often there was nothing to kill."""
    began = told = time.monotonic()
    missed = 0
    times = fault_times(rate, drawn)
    due = began + next(times)
    while not run.ended and time.monotonic() - began < longest:
        now = time.monotonic()
        if now >= due:
            victim = drawn.randrange(COUNT)
            due = began + next(times)
            if not run.kill(victim):
                missed += 1
        step = current_step(run)
        if step >= steps:
            break
        if now - told >= TOLD_SECONDS:
            told = now
            print(
                f"  {kind} at {rate:g}: step {step:,} of {steps:,} after {now - began:.0f} s, "
                f"{len(run.kills)} kills",
                flush=True,
            )
        time.sleep(POLL_SECONDS)
    if run.ended and current_step(run) < steps:
        raise SystemExit(f"the run ended early:\n{run.said[-3000:]}")
    return missed


def fault_times(rate: float, drawn: random.Random) -> Iterator[float]:
    """Yield seconds after the start, one in each 1 / `rate` of an hour."""
    for number in itertools.count():
        yield 3600 / rate * (number + drawn.random()) if rate else math.inf


def current_step(run: LaunchedRun) -> int:
    """Return the step that was finished last, also if the run went back to it."""
    return max(run.newest().values(), key=lambda step: step.at).number


def summary(run: LaunchedRun, steps: int, rows: int, missed: int, ended: float) -> dict[str, Any]:
    """Return the rate from the first step on, and where the time went."""
    starts = run.starts()
    order = sorted((step for start in starts for step in start.steps), key=lambda step: step.at)
    first, last = order[0], order[-1]
    complete = last.number >= steps
    seconds = (last.at if complete else ended) - first.at
    done = last.number - first.number
    computed = {step.at: step.number for step in order if step.writes}
    numbers = list(computed.values())
    again = sum(max(a - b + 1, 0) for a, b in itertools.pairwise(numbers))
    return {
        "kills": len(run.kills),
        "missed_faults": missed,
        "starts": len(starts),
        "seconds": seconds,
        "steps_done": done,
        "complete": complete,
        "steps_done_again": again,
        "rows_per_second": done * rows / seconds,
        "seconds_between_kill_and_step": [
            min((step.at for step in order if step.at > kill.at), default=last.at) - kill.at
            for kill in run.kills
        ],
    }


def draw(kinds: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw goodput by faults an hour."""
    with picture(path, 7.0, 4.2) as figure:
        axis = figure.subplots()
        axis.grid(axis="y")
        for (kind, runs), (colour, marker) in zip(kinds.items(), STYLES[1:], strict=False):
            rates = [run["faults_per_hour"] for run in runs]
            goodput = [100 * run["goodput"] for run in runs]
            axis.plot(rates, goodput, color=colour, marker=marker, label=KINDS[kind])
            for rate, value in zip(rates, goodput, strict=True):
                axis.annotate(
                    f"{value:.0f}%",
                    (rate, value),
                    xytext=(0, 6 if kind == "islands" else -14),
                    textcoords="offset points",
                    ha="center",
                    fontsize=9,
                    color=colour,
                )
        axis.set_ylim(0, 112)
        axis.set_xlabel("faults an hour (kill -9 of one of three)")
        axis.set_ylabel("goodput [% of the undisturbed run]")
        axis.legend(loc="lower left")


if __name__ == "__main__":
    main()

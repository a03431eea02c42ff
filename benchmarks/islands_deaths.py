"""Three islands, of which one after the other is killed and joins again: a timeline, and pauses.

At set times `kill -9` hits island 1, island 0, which writes the run's files, and island 2; the
launcher starts each again. The picture shows when each island was a member, and rows per second as
the writing island's hook saw them. Then more kills of a random island follow in the same run, each
once all three have been members for a while, for medians and 95th percentiles of

- the seconds from a kill to the next finished step of any island;
- the pause of the others in the step that a kill interrupts, its usual time subtracted;
- the same for the step at which an island joins, and is given the state;
- the seconds from a kill to the start of a new process, and from there to its first step.

Goal: a new process is productive within 15 seconds. Writes `results/islands_deaths.json` and
`docs/images/islands_run.png`.
"""

import argparse
import bisect
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from islands_runs import (
    COUNT,
    IMAGES,
    POLL_SECONDS,
    Kill,
    LaunchedRun,
    Start,
    Step,
)
from timing import environment, save

from replicax.bench.machine import Neighbours
from replicax.text.plot_style import picture

VICTIMS = 1, 0, 2
AT = 20.0, 60.0, 100.0
"""Seconds of the first kills, after the first step."""
AFTER_SECONDS = 40.0
"""How much of the run follows the last of them in the picture."""
PRODUCTIVE_SECONDS = 15.0
PICTURE = IMAGES / "islands_run.png"
USUAL = 10
"""Steps around an event, whose median is the usual step."""
LEAST_BEFORE = 2
"""Steps that an island needs before a kill, so that its usual step is known."""
NEAR = 2
"""Steps around a join of which the longest is taken."""
MEMBER, JOINING, MARK = "#009E73", "#E69F00", "#D55E00"
RATE = "#0072B2"


def main() -> None:
    args = arguments()
    neighbours, where = Neighbours(), environment()
    with tempfile.TemporaryDirectory(prefix="replicax-deaths-", ignore_cleanup_errors=True) as at:
        run = LaunchedRun(
            Path(at),
            islands=True,
            steps=10**8,
            rows=args.rows,
            save_seconds=args.save_seconds,
            mode=args.mode,
        )
        try:
            run.wait_for_all()
            began = time.time()
            scheduled(run, began, args)
            drawn_until = time.time()
            at_random(run, args)
        finally:
            run.close()
        starts = run.starts()
    events = []
    for kill in run.kills:
        told = event(kill, starts)
        if told is None:
            print(f"no figures of the kill of island {kill.number} after {kill.at - began:.1f} s")
        else:
            events.append(told)
    drawn = [kill for kill in run.kills if kill.at <= drawn_until]
    times = timeline(starts, drawn, began, drawn_until, args.rows, args.bin_seconds)
    figures = {name: figure([each[name] for each in events]) for name in events[0]}
    for name, told in figures.items():
        print(
            f"{name:<34} median {told['median']:6.2f}, p95 {told['p95']:6.2f}, "
            f"most {told['most']:6.2f} ({told['of']})"
        )
    slow = sum(each["restart_to_step_seconds"] > PRODUCTIVE_SECONDS for each in events)
    print(f"productive later than {PRODUCTIVE_SECONDS:g} s after a start: {slow} of {len(events)}")
    draw(times, args.out)
    if not args.quick:
        where["other_processes_used_cores"] = neighbours.cores()
        settings = vars(args) | {"out": None}
        result = {"environment": where, "settings": settings, "figures": figures}
        save("islands_deaths", {**result, "kills": events, "timeline": times})
    print(f"see {args.out}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--at", nargs=len(VICTIMS), type=float, default=AT, help="seconds of the first kills"
    )
    parser.add_argument(
        "--after", type=float, default=AFTER_SECONDS, help="seconds drawn after them (40)"
    )
    parser.add_argument("--kills", type=int, default=20, help="random ones that follow (20)")
    parser.add_argument(
        "--calm", type=float, default=5.0, help="seconds of training between them (5)"
    )
    parser.add_argument("--mode", default="jit", help="(jit)")
    parser.add_argument("--rows", type=int, default=24, help="of a batch (24)")
    parser.add_argument("--save-seconds", type=float, default=10.0, help="between checkpoints (10)")
    parser.add_argument(
        "--bin-seconds", type=float, default=1.0, help="of the rows per second drawn (1)"
    )
    parser.add_argument("--out", type=Path, default=PICTURE, help="the picture")
    parser.add_argument("--quick", action="store_true", help="a trial with 2 kills more; no JSON")
    args = parser.parse_args()
    if args.quick:
        args.at, args.after, args.kills, args.calm = (5.0, 25.0, 45.0), 20.0, 2, 2.0
        if args.out == PICTURE:
            args.out = Path(tempfile.gettempdir()) / PICTURE.name
    return args


def scheduled(run: LaunchedRun, began: float, args: argparse.Namespace) -> None:
    """Kill the first islands at their times; return when the picture is complete."""
    for number, after in zip(VICTIMS, args.at, strict=True):
        while time.time() < began + after:
            time.sleep(POLL_SECONDS)
        run.wait_for_all()  # otherwise later than asked, but no two at once
        run.kill(number)
        print(f"killed island {number} after {time.time() - began:.1f} s", flush=True)
    wait = began + args.at[-1] + args.after - time.time()
    time.sleep(max(wait, 0.0))
    run.wait_for_all()


def at_random(run: LaunchedRun, args: argparse.Namespace) -> None:
    """Kill random islands, each once all have trained together for a while."""
    drawn = random.Random(0)
    for number in range(args.kills):
        run.wait_for_all()
        time.sleep(args.calm * drawn.uniform(0.8, 1.2))  # anywhere in a step
        victim = drawn.randrange(COUNT)
        run.kill(victim)
        print(f"kill {number + 1} of {args.kills}: island {victim}", flush=True)
    run.wait_for_all()
    time.sleep(args.calm)


def event(kill: Kill, starts: Sequence[Start]) -> dict[str, float] | None:
    """Return the seconds and pauses that followed a kill; None if some are not known."""
    again = [each for each in starts if each.number == kill.number and each.began > kill.at]
    if not again or not again[0].steps:
        return None
    start, joined = again[0], again[0].steps[0]
    others = [
        each
        for each in starts
        if each.number != kill.number
        and sum(step.at < kill.at for step in each.steps) > LEAST_BEFORE
        and each.steps[-1].number > joined.number
    ]
    if not others:
        return None
    return {
        "kill_to_step_seconds": min(
            next(step.at for step in each.steps if step.at > kill.at) for each in others
        )
        - kill.at,
        "pause_at_kill_seconds": statistics.fmean(_pause_at(kill.at, e.steps) for e in others),
        "pause_at_join_seconds": statistics.fmean(
            _pause_at_join(joined.number, each.steps) for each in others
        ),
        "kill_to_restart_seconds": start.began - kill.at,
        "restart_to_step_seconds": joined.at - start.began,
    }


def _pause_at(at: float, steps: Sequence[Step]) -> float:
    """Return by how much the step at that time, or the next one, was longer than those before."""
    times = [step.at for step in steps]
    first = bisect.bisect_right(times, at)  # the first that finished after it
    before = np.diff(times[max(first - USUAL - 1, 0) : first])
    return float(max(np.diff(times[first - 1 : first + 2])) - np.median(before))


def _pause_at_join(number: int, steps: Sequence[Step]) -> float:
    """Return by how much the longest step around that number was longer than those after it."""
    at = next(place for place, step in enumerate(steps) if step.number >= number)
    times = [step.at for step in steps]
    near = np.diff(times[max(at - NEAR - 1, 0) : at + NEAR + 1])
    after = np.diff(times[at + NEAR : at + NEAR + USUAL + 1])
    return float(max(near) - np.median(after if len(after) else near))


def figure(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "p95": float(np.quantile(values, 0.95)),
        "most": max(values),
        "of": len(values),
    }


def timeline(
    starts: Sequence[Start],
    kills: Sequence[Kill],
    began: float,
    until: float,
    rows: int,
    bin_seconds: float,
) -> dict[str, Any]:
    """Return when each island was joining and a member, and rows per second, from `began` on."""
    spans = []
    for start in starts:
        killed = [kill.at for kill in kills if kill.pid == start.pid]
        end = min([*killed, until])
        joined = min(start.steps[0].at if start.steps else end, end)
        if start.began < until:
            spans.append(
                {
                    "island": start.number,
                    "start": start.began - began,
                    "first_step": joined - began,
                    "end": end - began,
                    "killed": bool(killed),
                }
            )
    finished: dict[int, float] = {}
    for start in starts:
        for step in start.steps:
            if step.writes:
                finished[step.number] = min(step.at, finished.get(step.number, step.at))
    edges = np.arange(0.0, until - began, bin_seconds)
    counts, _ = np.histogram([at - began for at in finished.values()], edges)
    return {
        "spans": spans,
        "bin_seconds": bin_seconds,
        "rows_per_second": [round(rows * int(each) / bin_seconds, 2) for each in counts],
    }


def draw(times: dict[str, Any], path: Path) -> None:
    """Draw the islands over time, and rows per second below."""
    with picture(path, 9.0, 5.0) as drawn:
        above, below = drawn.subplots(2, sharex=True, height_ratios=(1, 1.3))
        labelled: set[str] = set()

        def label(name: str) -> str | None:
            is_new = name not in labelled
            labelled.add(name)
            return name if is_new else None

        for span in times["spans"]:
            y = span["island"]
            begin, joined, end = (max(span[name], 0.0) for name in ("start", "first_step", "end"))
            if joined > begin:
                named = label("starting and joining")
                above.barh(y, joined - begin, 0.5, begin, color=JOINING, label=named)
            if end > joined:
                above.barh(y, end - joined, 0.5, joined, color=MEMBER, label=label("member"))
            if span["start"] > 0:
                above.plot(joined, y, "^", color=RATE, label=label("first step"), markersize=7)
            if span["killed"]:
                above.plot(end, y, "X", color=MARK, label=label("kill -9"), markersize=9)
        above.set_yticks(range(COUNT), [f"island {number}" for number in range(COUNT)])
        above.invert_yaxis()
        below.grid(axis="y")
        rates = times["rows_per_second"]
        edges = np.arange(len(rates) + 1) * times["bin_seconds"]
        below.stairs(rates, edges, color=RATE, fill=True, alpha=0.35)
        below.stairs(rates, edges, color=RATE, linewidth=1.2, baseline=None)
        for span in times["spans"]:
            if span["killed"]:
                below.axvline(span["end"], color=MARK, linewidth=1, linestyle="--")
            if span["start"] > 0:
                below.axvline(span["first_step"], color=RATE, linewidth=0.8, linestyle=":")
        below.set_xlim(0, edges[-1])
        below.set_ylim(bottom=0)
        below.set_ylabel("rows per second")
        below.set_xlabel("seconds")
        drawn.legend(loc="outside upper center", ncols=4)


if __name__ == "__main__":
    main()

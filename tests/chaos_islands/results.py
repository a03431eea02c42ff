"""Outcomes of trials: a line for each, a table of all, and what a file of results adds up."""

import dataclasses
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one trial."""

    fault: str
    seed: int
    islands: int
    how: str
    missed: bool
    """Whether the run finished before the fault."""
    equal: bool
    """Whether all final states have the bits of the undisturbed run; with rounds, of each other."""
    hung: bool
    starts: int
    left: int
    """Islands that left the others and ended with 75."""
    seconds: float
    usual_step_seconds: float | None
    recovery_seconds: list[float]
    """Time from each fault to the next step that nobody had done."""
    join_seconds: list[float]
    """Time between the steps before and after which an island joined."""
    wrong: list[str]
    rounds: bool = False
    """Whether islands took several steps between two exchanges."""

    def line(self) -> str:
        """Return what happened, and for a failed trial the command that repeats it."""
        back = ",".join(f"{1000 * seconds:.0f}" for seconds in self.recovery_seconds) or "-"
        told = "missed: the run was over" if self.missed else self.how
        line = (
            f"{'FAILED' if self.wrong else 'ok'} {self.fault} {self.seed}: {self.islands} islands, "
            f"{self.starts} starts, {self.left} left, back after {back} ms, {self.seconds:.1f} s "
            f"({told})"
        )
        if self.wrong:
            line += f": {'; '.join(self.wrong)}"
            rounds = "--rounds " if self.rounds else ""
            line += f" [{rounds}--faults {self.fault} --seed {self.seed} --trials 1]"
        return line


_HEAD = ("fault", "runs", "failed", "hung", "restarts", "median", "p95", "max ms", "joins ms")
_WIDTHS = (14, 6, 8, 6, 10, 8, 8, 8, 10)


def add(results: dict[str, Any], outcome: Outcome) -> None:
    """Add an outcome to the results by fault."""
    of = results.setdefault(outcome.fault, {})
    if outcome.missed:
        of["missed"] = of.get("missed", 0) + 1
    numbers = {
        "runs": not outcome.missed,
        "failures": bool(outcome.wrong),
        "hangs": outcome.hung,
        "unequal": not outcome.equal,
        "restarts": max(outcome.starts - outcome.islands, 0),
        "left": outcome.left,
    }
    for name, number in numbers.items():
        of[name] = of.get(name, 0) + int(number)
    if outcome.wrong:
        of.setdefault("failed", []).append([outcome.seed, outcome.wrong[0][:300]])
    usual = [outcome.usual_step_seconds] if outcome.usual_step_seconds is not None else []
    for name, seconds in (
        ("recovery", outcome.recovery_seconds),
        ("join_pause", outcome.join_seconds),
        ("usual_step", usual),
    ):
        all_of = of.setdefault(f"all_{name}_ms", [])
        all_of += [round(1000 * each) for each in seconds]


def add_summaries(of: dict[str, Any]) -> None:
    """Add summaries of all times to the results of a fault."""
    for name in ("recovery", "join_pause", "usual_step"):
        of[f"{name}_ms"] = summary(of[f"all_{name}_ms"])


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median, 95th percentile and maximum."""
    if not values:
        return None
    ordered = sorted(values)
    at = min(int(0.95 * len(ordered)), len(ordered) - 1)
    return {"median": statistics.median(ordered), "p95": ordered[at], "max": ordered[-1]}


def add_to_file(path: Path, outcome: Outcome, environment: Mapping[str, Any]) -> None:
    """Add an outcome to those of earlier runs of this tool."""
    told = json.loads(path.read_text()) if path.exists() else {}
    told["environment"] = dict(environment)
    add(told.setdefault("faults", {}), outcome)
    add_summaries(told["faults"][outcome.fault])
    kinds = told["faults"].values()
    told["all"] = {
        name: sum(kind[name] for kind in kinds)
        for name in ("runs", "failures", "hangs", "unequal", "restarts", "left")
    }
    text = json.dumps({name: told[name] for name in ("environment", "all", "faults")})
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_text(text + "\n")
    beside.replace(path)


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a table of outcomes by kind of fault, at most 80 columns wide."""
    results: dict[str, Any] = {}
    for outcome in outcomes:
        add(results, outcome)
    yield _row(_HEAD)
    for kind, of in sorted(results.items()):
        add_summaries(of)
        numbers = [of[name] for name in ("runs", "failures", "hangs", "restarts")]
        back, joins = of["recovery_ms"], of["join_pause_ms"]
        cells = [kind, *map(str, numbers)]
        cells += [f"{back[name]:.0f}" for name in ("median", "p95", "max")] if back else ["-"] * 3
        cells.append(f"{joins['median']:.0f}" if joins else "-")
        yield _row(cells)


def _row(cells: Sequence[str]) -> str:
    first, *rest = zip(cells, _WIDTHS, strict=True)
    return first[0].ljust(first[1]) + "".join(cell.rjust(width) for cell, width in rest)

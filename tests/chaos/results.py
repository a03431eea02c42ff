"""Outcomes of trials: a line for each, a table of all, and what a file of results adds up."""

import dataclasses
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one trial."""

    head: ClassVar[tuple[str, ...]]
    """Titles of the table's columns; the first is the kind of fault."""
    widths: ClassVar[tuple[int, ...]]

    fault: str
    seed: int
    how: str
    """The fault, in words."""
    missed: bool
    """Whether the run finished before the fault."""
    equal: bool
    """Whether all final states have the bits of the undisturbed run; with rounds, of each other."""
    starts: int
    recovery_seconds: list[float]
    """Time from each fault to the next step: of a run, of a restart; of islands, a new one."""
    seconds: float
    cpu_seconds: float
    """Processor time of all its processes, but for those of a launcher."""
    wrong: list[str]
    """Violated checks."""

    @property
    def who(self) -> str:
        """Who took part, in words."""
        raise NotImplementedError

    @property
    def again(self) -> str:
        """Options of the command that repeats the trial."""
        return f"--faults {self.fault} --seed {self.seed} --trials 1"

    def line(self) -> str:
        """Return what happened, and for a failed trial the options that repeat it."""
        back = ",".join(f"{1000 * seconds:.0f}" for seconds in self.recovery_seconds) or "-"
        told = "missed: the run was over" if self.missed else self.how
        line = (
            f"{'FAILED' if self.wrong else 'ok'} {self.fault} {self.seed}: {self.who}, "
            f"back after {back} ms, {self.seconds:.1f} s ({told})"
        )
        return f"{line}: {'; '.join(self.wrong)} [{self.again}]" if self.wrong else line

    @classmethod
    def cells(cls, outcomes: "Sequence[Any]") -> list[str]:
        """Return a row of the table, but for its first cell."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOutcome(Outcome):
    """The outcome of a trial of one run."""

    head = ("fault", "trials", "passed", "equal", "lost max", "mean", "back p50", "p95 s")
    widths = (15, 8, 8, 8, 10, 7, 10, 8)

    processes: int
    lost: list[int]
    """Steps repeated after each restart."""

    @property
    def who(self) -> str:
        return f"{self.processes} processes, {self.starts} starts"

    @classmethod
    def cells(cls, outcomes: "Sequence[RunOutcome]") -> list[str]:
        lost = [steps for outcome in outcomes for steps in outcome.lost]
        counts = [len(outcomes), sum(not o.wrong for o in outcomes), sum(o.equal for o in outcomes)]
        steps = [str(max(lost)), f"{statistics.mean(lost):.1f}"] if lost else ["-", "-"]
        back = summary([seconds for outcome in outcomes for seconds in outcome.recovery_seconds])
        seconds = [f"{back[name]:.2f}" for name in ("median", "p95")] if back else ["-", "-"]
        return [*map(str, counts), *steps, *seconds]


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandsOutcome(Outcome):
    """The outcome of a trial of several islands."""

    head = ("fault", "runs", "failed", "hung", "restarts", "median", "p95", "max ms", "joins ms")
    widths = (14, 6, 8, 6, 10, 8, 8, 8, 10)

    islands: int
    hung: bool
    left: int
    """Islands that left the others and ended with 75."""
    usual_step_seconds: float | None
    join_seconds: list[float]
    """Time between the steps before and after which an island joined."""
    rounds: bool = False
    """Whether islands took several steps between two exchanges."""

    @property
    def who(self) -> str:
        return f"{self.islands} islands, {self.starts} starts, {self.left} left"

    @property
    def again(self) -> str:
        return f"{'--rounds ' if self.rounds else ''}{super().again}"

    @classmethod
    def cells(cls, outcomes: "Sequence[IslandsOutcome]") -> list[str]:
        of: dict[str, Any] = {}
        for outcome in outcomes:
            add(of, outcome)
        add_summaries(of)
        back, joins = of["recovery_ms"], of["join_pause_ms"]
        cells = [str(of[name]) for name in ("runs", "failures", "hangs", "restarts")]
        cells += [f"{back[name]:.0f}" for name in ("median", "p95", "max")] if back else ["-"] * 3
        return [*cells, f"{joins['median']:.0f}" if joins else "-"]


def add(of: dict[str, Any], outcome: IslandsOutcome) -> None:
    """Add an outcome to the results of its fault."""
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


def add_to_file(path: Path, outcome: IslandsOutcome, environment: Mapping[str, Any]) -> None:
    """Add an outcome to those of earlier runs of this tool."""
    told = json.loads(path.read_text()) if path.exists() else {}
    told["environment"] = dict(environment)
    of = told.setdefault("faults", {}).setdefault(outcome.fault, {})
    add(of, outcome)
    add_summaries(of)
    kinds = told["faults"].values()
    told["all"] = {
        name: sum(kind[name] for kind in kinds)
        for name in ("runs", "failures", "hangs", "unequal", "restarts", "left")
    }
    text = json.dumps({name: told[name] for name in ("environment", "all", "faults")})
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    beside.write_text(text + "\n")
    beside.replace(path)


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median, 95th percentile and maximum."""
    if not values:
        return None
    ordered = sorted(values)
    at = min(int(0.95 * len(ordered)), len(ordered) - 1)
    return {"median": statistics.median(ordered), "p95": ordered[at], "max": ordered[-1]}


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a table of outcomes by kind of fault, at most 80 columns wide."""
    kind = type(outcomes[0])

    def row(first: str, *others: str) -> str:
        rest = zip(others, kind.widths[1:], strict=True)
        return first.ljust(kind.widths[0]) + "".join(cell.rjust(width) for cell, width in rest)

    yield row(*kind.head)
    faults = sorted({outcome.fault for outcome in outcomes})
    for fault in faults:
        yield row(fault, *kind.cells([each for each in outcomes if each.fault == fault]))
    if len(faults) > 1:
        yield row("all", *kind.cells(outcomes))
    if missed := sum(outcome.missed for outcome in outcomes):
        yield f"in {missed} of them nothing happened, as the run was over too soon"

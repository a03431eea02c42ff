"""Outcomes of trials, and their table."""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one trial."""

    fault: str
    seed: int
    processes: int
    how: str
    """The fault, in words."""
    missed: bool
    """Whether the run finished before the fault."""
    equal: bool
    """Whether the final state has the bits of the undisturbed run."""
    starts: int
    lost: list[int]
    """Steps repeated after each restart."""
    recovery_seconds: list[float]
    """Seconds from each fault to the first new step."""
    seconds: float
    cpu_seconds: float
    """Processor time of all its processes."""
    wrong: list[str]
    """Violated checks."""

    def line(self) -> str:
        """Return the command that repeats the trial, and its violated checks."""
        again = f"--fault {self.fault} --seed {self.seed} --trials 1"
        return f"FAILED {again} ({self.processes} processes; {self.how}): {'; '.join(self.wrong)}"


_HEAD = ("fault", "trials", "passed", "equal", "lost max", "mean", "back p50", "p95 s")
_WIDTHS = (15, 8, 8, 8, 10, 7, 10, 8)


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield a table of outcomes by kind of fault, at most 80 columns wide."""
    yield _row(_HEAD)
    kinds = list(dict.fromkeys(outcome.fault for outcome in outcomes))
    for kind in sorted(kinds):
        yield _row(_cells(kind, [outcome for outcome in outcomes if outcome.fault == kind]))
    if len(kinds) > 1:
        yield _row(_cells("all", outcomes))
    if missed := sum(outcome.missed for outcome in outcomes):
        yield f"in {missed} of them nothing happened, as the run was over too soon"


def _cells(kind: str, outcomes: Sequence[Outcome]) -> list[str]:
    lost = [steps for outcome in outcomes for steps in outcome.lost]
    back = sorted(seconds for outcome in outcomes for seconds in outcome.recovery_seconds)
    counts = [len(outcomes), sum(not o.wrong for o in outcomes), sum(o.equal for o in outcomes)]
    cells = [kind, *map(str, counts)]
    cells += [str(max(lost)), f"{statistics.mean(lost):.1f}"] if lost else ["-", "-"]
    cells += [f"{_at(back, 0.5):.2f}", f"{_at(back, 0.95):.2f}"] if back else ["-", "-"]
    return cells


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def _row(cells: Sequence[str]) -> str:
    first, *rest = zip(cells, _WIDTHS, strict=True)
    return first[0].ljust(first[1]) + "".join(cell.rjust(width) for cell, width in rest)

"""The cost of a target of the Makefile, held against `tests/budget.json`.

    python tests/support/cost.py test -- python -m pytest ...

runs the command and counts the processor seconds of all processes that it started. A reference
loop runs beside it every few seconds; cost is counted in seconds of a machine on which the loop
takes `LOOP_SECONDS`, so that a slow or a busy machine matters little. Above the budget it fails.
With `TEST_TIMES=write` in the environment the times of this run become the table of times,
`tests/durations.json`.
"""

import dataclasses
import datetime
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
LOOP_SECONDS = 0.025
"""Processor seconds of the reference loop, by definition."""
_EVERY_SECONDS = 4.0
_BEGIN, _END = "<!-- TEST_TIMES=write .ci/run writes this -->", "<!-- end -->"
_TABLE_SECONDS = 0.5
"""A file grows by at least that much, or is not mentioned."""
_PROGRAM = "\n".join(f"def f{n}(x, *y):\n    return [x + {n}, (y, {{'a': x}})]" for n in range(150))


def loop_seconds() -> float:
    """Return the processor seconds of the reference loop, now: Python that is compiled and run."""
    start = time.thread_time()
    for _ in range(4):
        names: dict[str, Any] = {}
        exec(compile(_PROGRAM, "", "exec"), names)
        table = {n: str(n) for n in range(20_000)}
        sum(len(table[n]) for n in table)
    return time.thread_time() - start


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a run."""

    status: int
    wall_seconds: float
    processor_seconds: float
    loops: list[float]
    files: dict[str, list[float]]
    """Cases, processor seconds and seconds by file."""

    @property
    def loop(self) -> float:
        """The median of the reference loop, in processor seconds."""
        return statistics.median(self.loops)

    @property
    def seconds(self) -> float:
        """The cost, in seconds of the reference."""
        return self.processor_seconds / self.loop * LOOP_SECONDS

    @property
    def cases(self) -> int:
        """The number of tests that ran."""
        return int(sum(cases for cases, *_ in self.files.values()))

    def by_file(self) -> dict[str, list[float]]:
        """Return cases, cost in seconds of the reference, and seconds by file."""
        scale = LOOP_SECONDS / self.loop
        return {
            name: [cases, round(processor * scale, 1), round(seconds, 1)]
            for name, (cases, processor, seconds) in self.files.items()
        }


def measured(command: Sequence[str]) -> Cost:
    """Run a command to its end, with the reference loop beside it."""
    start, before = time.monotonic(), _of_children()
    with tempfile.TemporaryDirectory() as folder:
        loops = [loop_seconds()]
        with subprocess.Popen(command, env={**os.environ, "TEST_TIMES_FOLDER": folder}) as running:
            while True:
                try:
                    running.wait(_EVERY_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    loops.append(loop_seconds())
                except KeyboardInterrupt:
                    continue  # pytest has it too, and ends
        files: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
        for path in Path(folder).glob("*.json"):
            for name, numbers in json.loads(path.read_text()).items():
                files[name] = [a + b for a, b in zip(files[name], numbers, strict=True)]
    wall = time.monotonic() - start
    return Cost(running.returncode, wall, _of_children() - before, loops, dict(files))


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def functions(path: Path) -> list[str]:
    """Return the names of the test functions of a file."""
    return re.findall(r"^ *def (test_\w+)", path.read_text(), re.M)


def counts(tests: Path = TESTS) -> dict[str, int]:
    """Return the number of test functions by file."""
    found = {path: len(functions(path)) for path in sorted(tests.rglob("test_*.py"))}
    return {path.relative_to(tests).as_posix(): count for path, count in found.items() if count}


def grown(
    files: dict[str, list[float]], table: dict[str, list[float]], most: int = 10
) -> list[str]:
    """Return lines on the files that grew most since the table."""
    more = {
        name: seconds - table.get(name, [0, 0.0])[1] for name, (_, seconds, *_) in files.items()
    }
    order = sorted(
        (name for name in more if more[name] >= _TABLE_SECONDS), key=lambda name: -more[name]
    )
    return [
        f"{name}: {table.get(name, [0, 0.0])[1]:.1f} -> {files[name][1]:.1f} s"
        for name in order[:most]
    ]


def report(
    piece: str, cost: Cost, budget: float | None, table: dict[str, list[float]]
) -> list[str]:
    """Return the lines that say what a piece cost, and where it grew."""
    quartiles = [
        f"{1000 * at:.1f}" for at in statistics.quantiles([*cost.loops, cost.loops[-1]], n=4)
    ]
    allowed = "no budget" if budget is None else f"budget {budget:,.0f}"
    lines = [
        f"{piece}: {cost.cases:,} cases cost {cost.seconds:,.0f} s of the reference ({allowed}); "
        f"{cost.processor_seconds:,.0f} processor s, {cost.wall_seconds:,.0f} s in all; "
        f"the loop took {quartiles[1]} ms ({quartiles[0]} to {quartiles[2]})"
    ]
    lines += [
        f"{piece}: grown since the table of times: {line}" for line in grown(cost.by_file(), table)
    ]
    if budget is not None and cost.seconds > budget:
        lines.append(
            f"{piece}: {cost.seconds:,.0f} s of the reference are {cost.seconds - budget:,.0f} "
            f"above the budget of {budget:,.0f} in tests/budget.json: make tests cheaper, or take "
            "out what the new ones make unnecessary"
        )
    return lines


def page(pieces: dict[str, Any], budgets: dict[str, float], most: int = 15) -> str:
    """Return the tables of CONTRIBUTING.md: what each target costs, and the slowest files."""
    lines = [
        "| target | cases | cost | budget | wall, s | loop, ms | Python | date |",
        "|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for name, of in pieces.items():
        numbers = (f"{of['cases']:,}", of["seconds"], budgets.get(name, ""), of["wall_seconds"])
        cells = (f"`make {name}`", *numbers, of["loop_ms"], of["python"], of["date"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| file of `make test` | cases | cost |", "|---|--:|--:|"]
    files = pieces.get("test", {}).get("files", {})
    order = sorted(files, key=lambda name: -files[name][1])
    lines += [f"| {name} | {files[name][0]} | {files[name][1]} |" for name in order[:most]]
    rest = [files[name] for name in order[most:]]
    cases, seconds = (sum(of[column] for of in rest) for column in (0, 1))
    return "\n".join([*lines, f"| {len(rest)} others | {cases} | {seconds:.1f} |"])


def write(piece: str, cost: Cost, tests: Path = TESTS) -> None:
    """Put the times of a run into the table, and the table into CONTRIBUTING.md."""
    path = tests / "durations.json"
    table = json.loads(path.read_text())
    table["functions"] = counts(tests)
    table["pieces"][piece] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "cases": cost.cases,
        "seconds": round(cost.seconds),
        "wall_seconds": round(cost.wall_seconds),
        "loop_ms": round(1000 * cost.loop, 1),
        "files": dict(sorted(cost.by_file().items())),
    }
    text = json.dumps(table, indent=1)
    path.write_text(re.sub(r"\[\s+(.+),\s+(.+),\s+(.+)\s+\]", r"[\1, \2, \3]", text) + "\n")
    contributing = tests.parent / "CONTRIBUTING.md"
    before, begin, rest = contributing.read_text().partition(_BEGIN)
    budgets = json.loads((tests / "budget.json").read_text())["seconds"]
    shown = page(table["pieces"], budgets)
    contributing.write_text(f"{before}{begin}\n{shown}\n{_END}{rest.partition(_END)[2]}")


def main(arguments: Sequence[str], tests: Path = TESTS) -> int:
    """Run the command after `--` as the piece before it; return the exit code."""
    piece, _, *command = arguments
    budgets = json.loads((tests / "budget.json").read_text())["seconds"]
    table = json.loads((tests / "durations.json").read_text())["pieces"]
    budget = budgets.get(piece)
    cost = measured(command)
    for line in report(piece, cost, budget, table.get(piece, {}).get("files", {})):
        print(line, flush=True)
    if os.environ.get("TEST_TIMES") == "write":
        write(piece, cost, tests)
    above = budget is not None and cost.seconds > budget
    return cost.status or int(above)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

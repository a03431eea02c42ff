"""Choose the tests of `make test` by what they reach and what they find, per second.

    make test-reach                                     # what each test reaches and costs
    python benchmarks/mutations.py run ... --out found.json            # what each test finds
    pytest --no-tiers --collect-only -q -m "not exhaustive" | grep :: >tests.txt  # to choose from
    python benchmarks/test_choice.py tests.txt --mutations found.json --seconds 400

In this order, the cheapest first each time: a test for each mutant that `make test` finds; the
tests of promises; those that reach none of the source (of documents and of the house); then every
line and every direction of a branch is reached once, twice and so on by tests of other names, while
seconds are left. What is not chosen leaves `make test`: `make test-all` runs it if it alone reaches
a line or finds a mutant, else `make test-everything`. The choice is written to `tests/tiers.json`.
"""

import argparse
import heapq
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Place = tuple[str, str, int, int]
TESTS_OF_FUNCTION = 6
FILE_SECONDS = 0.15
"""Seconds that the first test of a file costs more: its import."""
DOCUMENT_SECONDS = 1.0
"""Most seconds of a test that reaches nothing, of documents or the house, which is kept."""
CASE_SECONDS = 0.01
"""Least seconds of a test: its set-up."""


@dataclass
class Case:
    """A test, or one of its cases."""

    name: str
    seconds: float
    places: frozenset[int]

    @property
    def file(self) -> str:
        return self.name.partition("::")[0]

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]


@dataclass
class Choice:
    """The tests chosen so far, and how often each place is reached by them."""

    cases: dict[str, Case]
    chosen: dict[str, str] = field(default_factory=dict)
    """By name, the tier."""
    functions: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    files: set[str] = field(default_factory=set)
    seconds: float = 0.0

    def price(self, case: Case) -> float:
        """Return the seconds that a test would add."""
        return case.seconds + (FILE_SECONDS if case.file not in self.files else 0.0)

    def add(self, case: Case, tier: str) -> None:
        """Choose a test for a tier."""
        if case.name in self.chosen:
            return
        self.seconds += self.price(case)
        self.chosen[case.name] = tier
        self.files.add(case.file)
        for place in case.places:
            self.functions[place].add(case.function)

    def cheapest(self, names: Iterable[str]) -> Case | None:
        """Return the one that adds least, of those that exist."""
        known = [self.cases[name] for name in names if name in self.cases]
        return min(known, key=self.price, default=None)

    def cover(self, tier: str, times: int, most_seconds: float) -> None:
        """Add the tests that reach most per second until every place is reached so many times."""

        def gain(case: Case) -> float:
            new = sum(
                len(self.functions[place]) < times and case.function not in self.functions[place]
                for place in case.places
            )
            return new / self.price(case)

        heap = [(-gain(case), case.name) for case in self.cases.values()]
        heapq.heapify(heap)
        while heap and self.seconds < most_seconds:
            _, name = heapq.heappop(heap)
            case = self.cases[name]
            if name in self.chosen or not (now := gain(case)):
                continue
            if heap and now < -heap[0][0]:  # others were better before, and no gain grows
                heapq.heappush(heap, (-now, name))
            else:
                self.add(case, tier)


def known_cases(runs: list[str]) -> tuple[dict[str, Case], list[Place]]:
    """Return the tests of recorded runs that passed, and the places that they reach.

    A later record replaces an earlier one.
    """
    from support import reach

    indices: dict[Place, int] = {}
    cases = {}
    for record in (record for run in runs for record in reach.records(run)):
        ours = [indices.setdefault(place, len(indices)) for place in record.places]
        for test in record.tests:
            if test.passed:
                seconds = max(test.processor_seconds, CASE_SECONDS)
                places = frozenset(ours[place] for place in test.places)
                cases[test.name] = Case(test.name, seconds, places)
    return cases, list(indices)


def by_function(cases: list[Case], places: list[Place]) -> dict[str, Any]:
    """Return the table of `make test-changed`: by function, tests that reach it and little else."""
    named = [(file, re.sub(r"\.<locals>.*", "", name)) for file, name, _, _ in places]
    order = sorted(cases, key=lambda case: case.seconds * len(case.places))
    found: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for number, case in enumerate(order):
        for file, name in {named[place] for place in case.places}:
            tests = found[file, name]
            if name != "<module>" and len(tests) < TESTS_OF_FUNCTION:
                tests.setdefault(case.function, number)
    used = sorted({number for tests in found.values() for number in tests.values()})
    ours = {number: index for index, number in enumerate(used)}
    functions: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for (file, name), tests in sorted(found.items()):
        if tests:
            functions[file][name] = [ours[number] for number in tests.values()]
    tests_ = [[order[number].name, round(order[number].seconds, 2)] for number in used]
    return {"tests": tests_, "functions": functions}


def functions_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the cases of each function."""
    found = defaultdict(list)
    for name in names:
        found[name.partition("[")[0]].append(name)
    return dict(sorted(found.items()))


def tiers(every: Iterable[str], tier_of: Callable[[str], str]) -> dict[str, dict[str, Any]]:
    """Return by file and function the tier, where it is not `test`.

    Where cases differ, a table: the commonest tier under "*", and the cases of others.
    """
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for function, names in functions_of(every).items():
        file, _, test = function.removeprefix("tests/").partition("::")
        of_case = {name.removeprefix(function): tier_of(name) for name in sorted(names)}
        (commonest, count), *_ = Counter(of_case.values()).most_common()
        if count < len(names):
            others = {case: tier for case, tier in of_case.items() if tier != commonest}
            found[file][test] = {"*": commonest, **others}
        elif commonest != "test":
            found[file][test] = commonest
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tests", type=Path, help="names of the tests to choose from, a line each")
    parser.add_argument("--mutations", type=Path, nargs="*", default=[], help="mutations.py run's")
    parser.add_argument("--runs", nargs="+", default=["test"], help="of `make test-reach`")
    parser.add_argument("--exhaustive", type=Path, help="names of exhaustive tests, a line each")
    parser.add_argument("--most-cases", type=int, default=2, help="of an exhaustive function")
    parser.add_argument(
        "--keep", type=Path, help="functions of which all cases are kept, a line each"
    )
    parser.add_argument("--seconds", type=float, default=400.0, help="processor seconds of test")
    parser.add_argument("--all-seconds", type=float, default=2000.0, help="the same of test-all")
    options = parser.parse_args()
    from support.promises import marked_tests

    cases, places = known_cases(options.runs)
    now = options.tests.read_text().splitlines()
    choice = Choice({name: cases[name] for name in now if name in cases})
    killers = [
        draw["by"]
        for path in options.mutations
        for draw in json.loads(path.read_text())["draws"]
        if draw["outcome"] == "killed"
    ]
    for names in sorted(killers, key=len):
        if not choice.chosen.keys() & set(names) and (case := choice.cheapest(names)):
            choice.add(case, "test")
    print(f"{len(choice.chosen)} tests find {len(killers)} mutants in {choice.seconds:.0f} s")
    kept = set(options.keep.read_text().splitlines()) if options.keep else set()
    cases_of = functions_of(choice.cases)
    for functions in marked_tests().values():
        names = [name for each in functions for name in cases_of.get(f"tests/{each}", ())]
        if case := choice.cheapest(names):
            choice.add(case, "test")
    for case in choice.cases.values():
        if case.function in kept or (not case.places and case.seconds < DOCUMENT_SECONDS):
            choice.add(case, "test")
    print(f"{len(choice.chosen)} with those that are kept in {choice.seconds:.0f} s")
    for times in range(1, 9):
        choice.cover("test", times, options.seconds)
        print(f"{len(choice.chosen)} reach all {times} times in {choice.seconds:.0f} s")
    chosen = [cases[name] for name in choice.chosen]

    choice.seconds = 0.0
    for times in range(1, 9):
        choice.cover("test-all", times, options.all_seconds)
    exhaustive = options.exhaustive.read_text().splitlines() if options.exhaustive else []
    for function, names in functions_of(exhaustive).items():
        most = len(names) if function in kept else options.most_cases
        spaced = names[:: -(-len(names) // most)]
        choice.chosen |= dict.fromkeys(spaced, "test-all")
    every = {*now, *exhaustive}
    unknown = {name for name in now if name not in cases}  # they failed, or are not recorded
    choice.chosen |= dict.fromkeys(unknown, "test")
    found = tiers(every, lambda name: choice.chosen.get(name, "everything"))
    (ROOT / "tests" / "tiers.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = json.dumps(by_function(chosen, places), indent=1)
    lines = re.sub(r"\n {3,}|\n  (?=\])", " ", lines)
    (ROOT / "tests" / "reach.json").write_text(lines + "\n")
    counts = Counter(choice.chosen.get(name, "everything") for name in every)
    print(f"{dict(counts)}; test-all takes {choice.seconds:.0f} s")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()

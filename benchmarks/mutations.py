"""Break the source in drawn places, one at a time, and count how many breaks the tests catch.

    pip install cosmic-ray pytest-cov
    make test ARGS="--cov=replicax --cov-context=test --cov-report="
    python benchmarks/mutations.py draw --count 120 --seed 1 --out draws.json
    python benchmarks/mutations.py run draws.json --out results.json

A draw is a line of `core`, `train` or `cluster` that some test executes, and a change of it:
cosmic-ray's operators (an operator, a constant, a condition), or the line removed. Each is run
against the tests that reach the line, by coverage's contexts, quickest first, up to
`--most-seconds` of recorded time; it is caught if one fails, or if they take far longer than
recorded. Draws are text, so that the same are found in a later tree.
"""

import argparse
import ast
import difflib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOMS = ("core", "train", "cluster")
DRAWN = ("file", "line", "operator", "before", "after")
REMOVED = ast.Expr | ast.AugAssign | ast.Raise | ast.Delete | ast.Assert


class Reached:
    """The tests that execute a line, from coverage's database, and how long each takes."""

    def __init__(self, root: Path) -> None:
        from coverage.numbits import numbits_to_nums

        self.tests: dict[tuple[str, int], set[str]] = defaultdict(set)
        with sqlite3.connect(root / ".coverage") as base:
            found = base.execute(
                "select path, context, numbits from line_bits join file on file.id = file_id"
                " join context on context.id = context_id where context != ''"
            )
            for path, context, numbits in found:
                name = Path(path).relative_to(root).as_posix()
                for line in numbits_to_nums(numbits):
                    self.tests[name, line].add(context.rpartition("|")[0])
        self.seconds: dict[str, float] = {}
        for file in (root / "build" / "test-times").glob("**/*.json"):
            for row in json.loads(file.read_text())["rows"]:
                self.seconds[row["test"]] = row["seconds"]

    def chosen(self, name: str, line: int, most_seconds: float) -> tuple[list[str], float]:
        """The quickest tests that reach a line, and their seconds."""
        kept, total = [], 0.0
        reached = self.tests.get((name, line), ())
        for test in sorted(reached, key=lambda test: (self.seconds.get(test, 1.0), test)):
            total += self.seconds.get(test, 1.0)
            if kept and total > most_seconds:
                break
            kept.append(test)
        return kept, total


def places(source: str) -> dict[int, list[tuple[str, int]]]:
    """By line, the operators that change something there, each with its occurrence in the file."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    found: dict[int, list[tuple[str, int]]] = defaultdict(list)
    nodes = list(ast_nodes(get_ast(source)))
    for name in plugins.operator_names():
        if "Variable" in name:  # these need to be told which
            continue
        operator = plugins.get_operator(name)()
        each = (at for node in nodes for at in operator.mutation_positions(node))
        for occurrence, ((line, _), _) in enumerate(each):
            found[line].append((name, occurrence))
    for number, node in enumerate(ast.walk(ast.parse(source))):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, REMOVED) and not docstring:
            found[node.lineno].append(("RemoveLine", number))
    return found


def mutant(source: str, operator: str, occurrence: int) -> str:
    """Return the source with one change."""
    from cosmic_ray import mutating, plugins

    if operator != "RemoveLine":
        changed = mutating.mutate_code(source, plugins.get_operator(operator)(), occurrence)
        return str(changed)
    node: Any = list(ast.walk(ast.parse(source)))[occurrence]
    lines = source.splitlines(keepends=True)
    gone = [" " * node.col_offset + "pass\n"]
    return "".join(lines[: node.lineno - 1] + gone + lines[node.end_lineno :])


def draw(root: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` changes of lines that tests execute; a line is drawn first, then a change of it."""
    reached, chance = Reached(root), random.Random(seed)
    rooms = tuple(f"src/replicax/{room}/" for room in ROOMS)
    lines = sorted(where for where in reached.tests if where[0].startswith(rooms))
    chance.shuffle(lines)
    known: dict[str, dict[int, list[tuple[str, int]]]] = {}
    draws: list[dict[str, Any]] = []
    for name, line in lines:
        old = (root / name).read_text()
        known[name] = known.get(name) or places(old)
        if len(draws) == count or not known[name].get(line):
            continue
        # An operator's name tells what it replaces by what: kinds are as likely as one another.
        kinds = sorted({operator.split("_")[0] for operator, _ in known[name][line]})
        kind = chance.choice(kinds)
        operator, occurrence = chance.choice(
            [each for each in known[name][line] if each[0].split("_")[0] == kind]
        )
        before, after = old.splitlines(), mutant(old, operator, occurrence).splitlines()
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        changes = [code[1:] for code in matcher.get_opcodes() if code[0] != "equal"]
        (start, _, first, _), (_, end, _, last) = changes[0], changes[-1]
        draws.append(
            {
                "file": name,
                "line": start + 1,
                "operator": operator.removeprefix("core/"),
                "before": before[start:end],
                "after": after[first:last],
            }
        )
        print(f"{len(draws)}/{count} {name}:{line} {draws[-1]['operator']}", flush=True)
    return draws


def applied(source: str, draw: dict[str, Any]) -> tuple[str, int] | None:
    """The changed source and the line of the change; None where the text is no more."""
    lines, before = source.splitlines(), draw["before"]
    size = len(before)
    places = [at for at in range(len(lines)) if lines[at : at + size] == before]
    if not places:
        return None
    at = min(places, key=lambda place: abs(place + 1 - draw["line"]))
    return "\n".join([*lines[:at], *draw["after"], *lines[at + size :]]) + "\n", at + 1


def run(root: Path, python: str, draws: list[dict[str, Any]], most: float, jobs: int) -> None:
    """Run the tests of each draw, in `jobs` copies of the tree, and add what came of it."""
    reached, local, done = Reached(root), threading.local(), iter(range(1, len(draws) + 1))
    with tempfile.TemporaryDirectory() as scratch:

        def copy() -> Path:
            if not hasattr(local, "tree"):
                local.tree = Path(tempfile.mkdtemp(dir=scratch)) / "tree"
                kept_out = shutil.ignore_patterns(".venv*", ".git", "build", ".coverage", ".*cache")
                shutil.copytree(root, local.tree, ignore=kept_out)
            return Path(local.tree)

        def one(draw: dict[str, Any]) -> None:
            tree = copy()
            path = tree / draw["file"]
            source = path.read_text() if path.exists() else ""
            if (changed := applied(source, draw)) is None:
                draw["outcome"] = "gone"
                return
            tests, seconds = reached.chosen(draw["file"], changed[1], most)
            draw |= {"reached": len(reached.tests.get((draw["file"], changed[1]), ()))}
            draw |= {"run": len(tests), "line": changed[1]}
            path.write_text(changed[0])
            try:
                draw |= outcome(tree, python, tests, 60 + 4 * seconds) if tests else {}
                draw.setdefault("outcome", "missed")
            finally:
                path.write_text(source)
            about = f"{draw['file']}:{draw['line']} {draw['operator']}"
            print(f"{next(done)}/{len(draws)} {draw['outcome']:7} {about}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, draws))


def outcome(tree: Path, python: str, tests: list[str], limit: float) -> dict[str, Any]:
    """`caught` with the test that failed, or `missed`."""
    chosen = tree / "chosen-tests.txt"
    chosen.write_text("\n".join(tests))
    env = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [python, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider"]
    try:
        ended = subprocess.run(
            [*command, f"@{chosen}"],
            cwd=tree,
            env=env,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": "caught", "by": "time"}
    if not ended.returncode:
        return {"outcome": "missed"}
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return {"outcome": "caught", "by": failed[0][:200] if failed else ended.stderr[-200:]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("verb", choices=("draw", "run"))
    parser.add_argument("draws", nargs="?", type=Path, help="of `run`: the file that `draw` wrote")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the checkout under test")
    parser.add_argument("--python", default=sys.executable, help="of the checkout's environment")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most-seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    root = options.root.resolve()
    if options.verb == "draw":
        draws = draw(root, options.count, options.seed)
    else:
        every = json.loads(options.draws.read_text())["draws"]  # with what came of them elsewhere
        draws = [{name: each[name] for name in DRAWN} for each in every]
        run(root, options.python, draws, options.most_seconds, options.jobs)
    counts = {name: sum(d.get("outcome") == name for d in draws) for name in ("caught", "missed")}
    options.out.write_text(json.dumps({**counts, "seed": options.seed, "draws": draws}, indent=1))
    print(counts)


if __name__ == "__main__":
    main()

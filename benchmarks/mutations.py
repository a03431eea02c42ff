"""Break the source in drawn places, one at a time, and count how many breaks the tests find.

    pip install cosmic-ray                          # in an environment of its own, for `draw`
    python benchmarks/mutations.py draw draws.json --count 330 --seed 1
    make test-reach                                 # which lines each test reaches, its seconds
    .venv/bin/python benchmarks/mutations.py run draws.json --runs test --out results.json

A draw is a line in the body of a function, anywhere in the package, and a change of it that
compiles: one of cosmic-ray's operators (an operator, a constant, a condition), or the statement
removed. It is run against the tests that reach the line, those first that are cheap and reach
little else, until `--kills` of them have failed or `--most-seconds` of recorded time are over. A
mutant is killed if a test fails; if the tests do not end in time, it does not count. Draws are
text, so that the same are found in a later tree; given the results of an earlier run, the tests
that found a change then are tried first.
"""

import argparse
import ast
import contextlib
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

DRAWN = ("file", "line", "operator", "before", "after")
REMOVED = ast.Expr | ast.AugAssign | ast.Raise | ast.Delete | ast.Assert
ANY_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
JOB = Path(__file__).parent / "mutant.py"
ROOT = Path(__file__).resolve().parents[1]


def function_lines(tree: ast.Module) -> set[int]:
    """Return the lines of statements in functions, without docstrings and signatures."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, ANY_FUNCTION):
            for statement in node.body:
                if not _is_text(statement):
                    lines.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    return lines


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


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
        if isinstance(node, REMOVED) and not _is_text(node):
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


def draw(count: int, seed: int, among: Collection[str] = ()) -> Iterator[dict[str, Any]]:
    """`count` changes; a line is drawn first, then a kind of change, then a change of that kind.

    `among`: the files to change, by default all.
    """
    chance = random.Random(seed)
    files = sorted((ROOT / "src" / "replicax").rglob("*.py"))
    files = [path for path in files if not among or path.relative_to(ROOT).as_posix() in among]
    lines = [
        (path, line)
        for path in files
        for line in sorted(function_lines(ast.parse(path.read_text())))
    ]
    chance.shuffle(lines)
    known: dict[Path, dict[int, list[tuple[str, int]]]] = {}
    for path, line in lines:
        old = path.read_text()
        if path not in known:
            known[path] = places(old)
        if not known[path].get(line):
            continue
        # An operator's name tells what it replaces by what: kinds are as likely as one another.
        kinds = sorted({operator.split("_")[0] for operator, _ in known[path][line]})
        kind = chance.choice(kinds)
        operator, occurrence = chance.choice(
            [each for each in known[path][line] if each[0].split("_")[0] == kind]
        )
        new = mutant(old, operator, occurrence)
        if not _is_other_program(old, new):
            continue
        yield {
            "file": path.relative_to(ROOT).as_posix(),
            "operator": operator.removeprefix("core/"),
            **_difference(old.splitlines(), new.splitlines()),
        }
        count -= 1
        if not count:
            return


def _is_other_program(old: str, new: str) -> bool:
    try:
        return ast.dump(ast.parse(old)) != ast.dump(ast.parse(new)) and bool(
            compile(new, "", "exec")
        )
    except SyntaxError:
        return False


def _difference(before: list[str], after: list[str]) -> dict[str, Any]:
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    changes = [code[1:] for code in matcher.get_opcodes() if code[0] != "equal"]
    (start, _, first, _), (_, end, _, last) = changes[0], changes[-1]
    return {"line": start + 1, "before": before[start:end], "after": after[first:last]}


def applied(source: str, draw: dict[str, Any]) -> tuple[str, int] | None:
    """The changed source and the line of the change; None where the text is no more."""
    lines, before = source.splitlines(), draw["before"]
    size = len(before)
    places = [at for at in range(len(lines)) if lines[at : at + size] == before]
    if not places:
        return None
    at = min(places, key=lambda place: abs(place + 1 - draw["line"]))
    return "\n".join([*lines[:at], *draw["after"], *lines[at + size :]]) + "\n", at + 1


class Reached:
    """The tests that reach a line, in the order in which they are tried, with their seconds."""

    def __init__(self, runs: list[str], only: set[str] | None) -> None:
        from support import reach

        self._only = only
        self._tests: dict[tuple[str, int], list[tuple[float, float, str]]] = defaultdict(list)
        for record in (record for run in runs for record in reach.records(run)):
            for test in record.tests:
                if not test.passed or (only is not None and test.name not in only):
                    continue
                seconds = max(test.processor_seconds, test.seconds / 4, 0.02)
                for place in test.places:
                    name, _, line, destination = record.places[place]
                    if not destination:
                        row = (seconds * len(test.places), seconds, test.name)
                        self._tests[f"src/replicax/{name}", line].append(row)
        for rows in self._tests.values():
            rows.sort()

    def chosen(
        self, name: str, line: int, most_seconds: float, first: list[str]
    ) -> tuple[list[str], int]:
        """Return the tests for `most_seconds` of recorded time, and how many there are.

        `first`: tests that found this change in another run.
        """
        known = [each for each in first if "::" in each and each in (self._only or first)]
        rows, kept, total = self._tests.get((name, line), []), known, 0.0
        for _, seconds, test in rows:
            total += seconds
            if kept and total > most_seconds:
                break
            kept += [test] * (test not in kept)
        return kept, len(rows)


class Trials:
    """Runs mutants, each in a copy of the tree and in a process forked from a warm one."""

    def __init__(self, reached: Reached, options: argparse.Namespace) -> None:
        from support.fork_server import ForkServer

        self._reached, self._options = reached, options
        self._local = threading.local()
        self._scratch = tempfile.TemporaryDirectory()
        modules = ("jax", "optax", "orbax.checkpoint", "flax.nnx", "flax.linen", "msgspec")
        self._server = ForkServer(os.environ, modules)
        self._done = iter(range(1, sys.maxsize))

    def run(self, draws: list[dict[str, Any]]) -> None:
        """Add to each draw what came of it."""
        with self._scratch, ThreadPoolExecutor(self._options.jobs) as pool:
            list(pool.map(self._one, draws))
        self._server.close()

    def _tree(self) -> Path:
        if not hasattr(self._local, "tree"):
            tree = Path(tempfile.mkdtemp(dir=self._scratch.name)) / "tree"
            tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
            for name in filter(None, tracked.split("\0")):
                if (ROOT / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / name, tree / name)
            (tree / "build").mkdir()
            (ROOT / "build" / "test-programs").mkdir(parents=True, exist_ok=True)
            (tree / "build" / "test-programs").symlink_to(ROOT / "build" / "test-programs")
            self._local.tree = tree
        return Path(self._local.tree)

    def _one(self, draw: dict[str, Any]) -> None:
        path = self._tree() / draw["file"]
        source = path.read_text() if path.exists() else ""
        changed = applied(source, draw)
        if changed is None:
            draw["outcome"] = "gone"
            return
        first = draw.pop("by", [])
        tests, count = self._reached.chosen(
            draw["file"], changed[1], self._options.most_seconds, first
        )
        draw |= {"reached": count, "run": len(tests), "line": changed[1], "outcome": "missed"}
        if tests:
            path.write_text(changed[0])
            try:
                draw |= self._outcome(tests)
            finally:
                path.write_text(source)
        about = f"{draw['file']}:{draw['line']} {draw['operator']}"
        print(f"{next(self._done)} {draw['outcome']:7} {about}", flush=True)

    def _outcome(self, tests: list[str]) -> dict[str, Any]:
        tree = self._tree()
        (tree / "chosen.txt").write_text("\n".join(tests))
        told, log = tree / "failed.json", tree / "out.txt"
        told.unlink(missing_ok=True)
        command = [str(JOB), str(tree), str(told), str(self._options.kills)]
        child = self._server.fork(command, {}, log, log)
        ended = self._server.wait([child], 60 + 4 * self._options.most_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if not ended:
            return {"outcome": "endless"}
        if not told.exists():  # it ended in the middle of a test
            return {"outcome": "killed", "by": [f"exit code {child.status}"]}
        failed = json.loads(told.read_text())
        return {"outcome": "killed", "by": failed} if failed else {}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    drawing = verbs.add_parser("draw", help="draw changes of this checkout")
    drawing.add_argument("draws", type=Path)
    drawing.add_argument("--count", type=int, default=330)
    drawing.add_argument("--seed", type=int, default=1)
    running = verbs.add_parser("run", help="run the tests of each draw")
    running.add_argument("draws", type=Path)
    running.add_argument("--runs", nargs="+", default=["test"], help="of `make test-reach`")
    running.add_argument("--tests", type=Path, help="names of tests, a line each: no others")
    running.add_argument("--kills", type=int, default=1, help="failures that end a trial")
    running.add_argument("--most-seconds", type=float, default=40.0)
    running.add_argument("--jobs", type=int, default=2)
    running.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.verb == "draw":
        draws = []
        for each in draw(options.count, options.seed):
            draws.append(each)
            print(f"{len(draws)} {each['file']}:{each['line']} {each['operator']}", flush=True)
        options.draws.write_text(json.dumps({"seed": options.seed, "draws": draws}, indent=1))
        return
    every = json.loads(options.draws.read_text())["draws"]  # with what came of them elsewhere
    draws = [{name: each[name] for name in (*DRAWN, "by") if name in each} for each in every]
    only = set(options.tests.read_text().splitlines()) if options.tests else None
    Trials(Reached(options.runs, only), options).run(draws)
    outcomes = ("killed", "missed", "endless", "gone")
    counts = {name: sum(d["outcome"] == name for d in draws) for name in outcomes}
    options.out.write_text(json.dumps({**counts, "draws": draws}, indent=1) + "\n")
    print(counts)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    main()

"""Run the tests that reach what the working tree changed: `make test-changed`.

`tests/reach.json`, which benchmarks/test_choice.py writes, names for each function of the package
the tests of `make test` that reach it and little else. These run for each changed function, up to
`--most-seconds`, and the test files that changed. What a function that is new, or a line outside of
functions does, is not known: then the tests of the file's other functions run.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "src/replicax/"
REACH = ROOT / "tests" / "reach.json"


def changed_lines(root: Path, base: str) -> dict[str, set[int]]:
    """Return by file the lines that differ from a commit; where lines went, those around."""
    command = ["git", "diff", "--unified=0", "--no-color", "--no-ext-diff", base, "--"]
    diff = subprocess.check_output([*command, "src", "tests"], cwd=root, text=True)
    changed: dict[str, set[int]] = {}
    name = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            name = line.removeprefix("+++ b/")
        elif found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(found[1]), int(found[2] or 1)
            lines = range(start, start + count) if count else (start, start + 1)
            changed.setdefault(name, set()).update(lines)
    untracked = ["git", "ls-files", "--others", "--exclude-standard", "src", "tests"]
    for name in subprocess.check_output(untracked, cwd=root, text=True).splitlines():
        changed[name] = {0}
    return {name: lines for name, lines in changed.items() if (root / name).is_file()}


def functions_at(source: str, lines: set[int]) -> tuple[set[str], bool]:
    """Return the outermost functions of the lines, by qualified name; and whether others remain."""

    def spans(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child.lineno, child.end_lineno or child.lineno
            elif isinstance(child, ast.ClassDef):
                yield from spans(child, f"{prefix}{child.name}.")

    found, inside = set(), set()
    for name, first, last in spans(ast.parse(source), ""):
        if here := lines.intersection(range(first, last + 1)):
            found.add(name)
            inside |= here
    return found, bool(lines - inside)


def tests_of(root: Path, changed: dict[str, set[int]]) -> tuple[list[str], dict[str, float]]:
    """Return the changed test files, and the tests of changed functions with their seconds."""
    reach = json.loads((root / "tests" / "reach.json").read_text())
    files, numbers = [], set()
    for name, lines in changed.items():
        if name.startswith("tests/") and re.match(r"test_.*\.py$", Path(name).name):
            files.append(name)
        if name.startswith(PACKAGE) and name.endswith(".py"):
            known: dict[str, list[int]] = reach["functions"].get(name.removeprefix(PACKAGE), {})
            found, others = functions_at((root / name).read_text(), lines)
            names = known if others or not known.keys() & found else known.keys() & found
            numbers |= {number for function in names for number in known[function]}
    tests = [reach["tests"][number] for number in sorted(numbers)]
    return files, {name: seconds for name, seconds in tests if name.partition("::")[0] not in files}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base", default="HEAD", help="the commit that the tree is compared with")
    parser.add_argument("--most-seconds", type=float, default=30.0)
    options = parser.parse_args()
    changed = changed_lines(ROOT, options.base)
    files, tests = tests_of(ROOT, changed)
    total, kept = 0.0, []
    for name in sorted(tests, key=lambda name: tests[name]):
        total += tests[name]
        if total <= options.most_seconds or not kept:
            kept.append(name)
    left = f"; {len(tests) - len(kept)} more would take longer" if len(kept) < len(tests) else ""
    about = f"{len(changed)} changed files: {len(files)} files of tests and {len(kept)} tests{left}"
    print(about, flush=True)
    if not files and not kept:
        return 0
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not exhaustive", *files, *kept]
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())

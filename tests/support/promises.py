"""The promises of the pages and the tests that hold them: the table in `docs/promises.md`.

    python tests/support/promises.py --write

A test holds a promise if it bears `@pytest.mark.promise("id")`. The last column follows from that.
"""

import ast
import functools
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/promises.md"
ROW = re.compile(r"^\| `(\S+)` \| (.+) \| \[.+\]\((\S+)\) \|.*\|$", re.M)
"""A row's id, promise and link."""


@functools.cache
def marked_tests() -> dict[str, list[str]]:
    """Return the marked tests of each promise as `path::function`, without importing any."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "pytest.mark.promise(" not in text:
            continue
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        for function, mark in ((each, mark) for each in functions for mark in each.decorator_list):
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                name = f"{path.relative_to(TESTS).as_posix()}::{function.name}"
                for promise in map(ast.literal_eval, mark.args):
                    found.setdefault(promise, []).append(name)
    return found


def written(page: str) -> str:
    """Return the page with the tests that are marked now in the last column."""
    tests = marked_tests()

    def row(match: re.Match[str]) -> str:
        begin, _, _ = match[0].removesuffix(" |").rpartition("|")
        return f"{begin}| {', '.join(f'`{name}`' for name in tests.get(match[1], []))} |"

    return ROW.sub(row, page)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

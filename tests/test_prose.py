"""Tests pin numbers, names and codes, so that any sentence can be reworded."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
THREE_WORDS = re.compile(r"\b[A-Za-z]{2,}(?:,? [A-Za-z][A-Za-z'-]*){2,}")


def pinned(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings of asserts, and of `match=`, that hold three words in a row."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            held: ast.expr = node.test
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "assert_mentions":
            held = node
        elif isinstance(node, ast.keyword) and node.arg == "match":
            held = node.value
        else:
            continue
        for part in ast.walk(held):
            if isinstance(part, ast.Constant) and THREE_WORDS.search(str(part.value)):
                yield part


def test_no_assertion_holds_three_words_of_prose() -> None:
    for path in TESTS.rglob("*.py"):
        found = [(part.lineno, part.value) for part in pinned(ast.parse(path.read_text("utf-8")))]
        assert not found, path

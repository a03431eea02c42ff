"""Rule on optimizers that choose parameters by rank in a file whose model scans over layers."""

import ast
import re
from collections.abc import Iterator

from replicax.lint.parsed import WARNING, ParsedFile, given, keywords

_MUON = "optax.contrib.muon"
_OF_LAYERS = re.compile(r"flax\.(nnx|linen)\.scan$")
_LAYERS = re.compile(r"param|block|layer|weight|stack|model", re.IGNORECASE)


def check_rank_rules(program: ParsedFile) -> None:
    """Report masks by `ndim`, and the default of Muon, beside a scan over stacked layers."""
    if not any(_scans_over_layers(program, call) for call in program.calls()):
        return
    functions = {each.name: each for each in program.nodes if isinstance(each, ast.FunctionDef)}
    for call in program.calls():
        if not program.called(call).startswith("optax."):
            continue
        by_default = program.called(call) == _MUON and not any(
            name and "dimension_numbers" in name for name in keywords(call)
        )
        if by_default or any(_by_rank(each, functions) for each in given(call)):
            program.report(
                "rank-rule",
                call,
                "parameters are chosen by rank, and a scan over layers stacks them: biases "
                "[layers, width] count as matrices, and matrices have three dims",
                "choose by path, as rx.optimizers.muon(rate, matrices=...), or by a mask of names",
                WARNING,
            )


def _scans_over_layers(program: ParsedFile, call: ast.Call) -> bool:
    name = program.called(call)
    if _OF_LAYERS.search(name):
        return True
    over = [*call.args[2:3], *(each.value for each in call.keywords if each.arg == "xs")]
    return name == "jax.lax.scan" and any(_LAYERS.search(ast.unparse(each)) for each in over)


def _by_rank(argument: ast.AST, functions: dict[str, ast.FunctionDef]) -> bool:
    """Whether an argument is a function, of this file or in place, that compares ranks."""
    named = functions.get(argument.id) if isinstance(argument, ast.Name) else None
    inside = named or (argument if isinstance(argument, ast.Lambda) else None)
    return inside is not None and any(map(_is_rank, _compared(inside)))


def _compared(function: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Compare):
            yield from (node.left, *node.comparators)


def _is_rank(node: ast.expr) -> bool:
    """Whether it is `leaf.ndim`, `jnp.ndim(leaf)` or `len(leaf.shape)`."""
    if isinstance(node, ast.Call) and node.args:
        called = ast.unparse(node.func)
        of_shape = called == "len" and ast.unparse(node.args[0]).endswith(".shape")
        return of_shape or called.endswith(".ndim")
    return isinstance(node, ast.Attribute) and node.attr == "ndim"

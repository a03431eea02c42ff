"""Rules on the training loop: what is fetched, and what is compiled, at every turn."""

import ast
import re
from collections.abc import Iterator

from replicax.lint.finding import WARNING, Report
from replicax.lint.parsed import (
    BATCH,
    COMPILES,
    FUNCTIONS,
    LOOPS,
    SHARD_MAP,
    ParsedFile,
    given,
    names_in,
    targets,
)

_FETCHES = {
    *("float", "int", "print", "numpy.asarray", "numpy.array", "numpy.mean", "jax.device_get"),
    "wandb.log",
}
_FETCHING_METHODS = {"item", "tolist", "set_postfix", "set_description", "add_scalar"}
_STEP = re.compile(r"(^|_)step(_fn)?$")
"""Usual names of a compiled step, for where the file does not show that it is one."""
_EPOCH = re.compile(r"(^|_)(epochs?|seeds?|folds?|trials?|rounds?)($|_)")
_FEW = 5
"""Turns of a loop, each of which may well be looked at."""


def check_loops(program: ParsedFile, report: Report) -> None:
    """Report what the loops of a file fetch and compile at each turn."""
    steps = _compiled_names(program)
    for loop in program.nodes:
        if isinstance(loop, LOOPS) and not _is_traced(program, loop):
            _check_fetches(program, loop, steps, report)
            _check_compiled(program, loop, report)


def _compiled_names(program: ParsedFile) -> set[str]:
    """Return the names of functions that a file compiles."""
    found = set()
    for node in program.nodes:
        if isinstance(node, ast.FunctionDef):
            found |= {node.name} if _is_compiled(program, node) else set()
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            found.update(targets(node) if program.called(node.value) in COMPILES else [])
    return found


def _is_compiled(program: ParsedFile, node: ast.AST) -> bool:
    """Return whether it is a function that is compiled."""
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    mapped = any(each.function is node for each in program.mapped)
    return mapped or any(program.called(each) in COMPILES for each in decorators)


def _is_traced(program: ParsedFile, node: ast.AST) -> bool:
    return any(_is_compiled(program, outer) for outer in program.around(node))


def _own(loop: ast.For | ast.AsyncFor | ast.While) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes of a loop's body, and whether something decides if they are reached.

    Not those of loops and functions in it.
    """

    def below(node: ast.AST, guarded: bool) -> Iterator[tuple[ast.AST, bool]]:
        yield node, guarded
        if isinstance(node, (*FUNCTIONS, *LOOPS, ast.ClassDef)):
            return
        inner = guarded or isinstance(node, ast.If | ast.IfExp | ast.Try | ast.ExceptHandler)
        for child in ast.iter_child_nodes(node):
            yield from below(child, inner)

    guarded = False
    for statement in loop.body:
        yield from below(statement, guarded)
        leaves = any(isinstance(each, ast.Continue | ast.Break) for each in ast.walk(statement))
        if isinstance(statement, ast.If) and leaves and _counts(statement.test):
            guarded = True  # `if step % 100: continue`


def _counts(test: ast.expr) -> bool:
    return any(
        isinstance(each, ast.Mod) or (isinstance(each, ast.Name) and "step" in each.id)
        for each in ast.walk(test)
    )


def _check_fetches(
    program: ParsedFile,
    loop: ast.For | ast.AsyncFor | ast.While,
    steps: set[str],
    report: Report,
) -> None:
    if _is_quiet(program, loop):
        return
    nodes = list(_own(loop))
    waiting: set[str] = set()
    for node, _ in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func).rpartition(".")[2]
            waiting.update(targets(node) if name in steps or _STEP.search(name) else [])
    for node, guarded in nodes:
        if guarded or not isinstance(node, ast.Call) or _acts(program.parents[node]):
            continue
        if _fetched(program, node) & waiting:
            report.add(
                "fetched-every-step",
                node,
                "the host waits here for the devices at every step, and they wait for the host to "
                "start the next one",
                "fetch every n steps (if step % n == 0:), or keep the arrays and fetch them after "
                "the loop",
                WARNING,
            )


def _acts(node: ast.AST) -> bool:
    """Whether an environment is given what is fetched: nothing goes on without it."""
    called = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
    return called in ("step", "send")


def _fetched(program: ParsedFile, call: ast.Call) -> set[str]:
    """Return the names of what a call has the host wait for."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if program.name(call.func) in _FETCHES:
        return _arrays(*given(call))
    return _arrays(*(given(call) or [call.func])) if method in _FETCHING_METHODS else set()


def _arrays(*nodes: ast.AST) -> set[str]:
    """Return the names in some nodes whose values are needed, and not their shapes alone."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        if getattr(node, "attr", "") not in ("shape", "dtype", "ndim", "size"):
            found |= _arrays(*ast.iter_child_nodes(node))
    return found


def _is_quiet(program: ParsedFile, loop: ast.AST) -> bool:
    """Whether every turn of a loop may well be looked at: a few, or epochs, or configurations."""
    if not isinstance(loop, ast.For | ast.AsyncFor):
        return False
    over = loop.iter
    names = targets(loop)
    if isinstance(over, ast.Call) and program.name(over.func) == "range" and len(over.args) == 1:
        last = ast.unparse(over.args[0])
        if last.isdecimal() and int(last) <= _FEW:
            return True
        names.append(last)
    listed = isinstance(over, ast.Tuple | ast.List | ast.Set)
    return listed or any(_EPOCH.search(name) for name in names)


def _check_compiled(
    program: ParsedFile, loop: ast.For | ast.AsyncFor | ast.While, report: Report
) -> None:
    turns = set(targets(loop))
    batches = any(BATCH.match(name) for name in turns) or isinstance(loop, ast.While)
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Tuple | ast.List):
        return
    local = {node.name for node, _ in _own(loop) if isinstance(node, ast.FunctionDef)}
    for node, _ in _own(loop):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        kind = program.name(node.func)
        if kind not in COMPILES:
            continue
        made = node.args[0]
        anew = isinstance(made, ast.Lambda | ast.Call) or names_in(made) & local
        if not (anew or kind in SHARD_MAP) or (names_in(node) & turns and not batches):
            continue
        what = kind.rpartition(".")[2].removeprefix("filter_")
        report.add(
            "compiled-in-loop",
            node,
            f"{what} of a new function at every turn of the loop: it is traced and compiled anew "
            "each time",
            f"make it once before the loop: step = jax.{what}(...)",
            WARNING,
        )

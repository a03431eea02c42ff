"""Rule on values that a compiled function closes over and that are assigned again later."""

import ast
from collections.abc import Iterator, Sequence

from replicax.lint.finding import WARNING, Report
from replicax.lint.parsed import COMPILES, FUNCTIONS, LOOPS, Function, ParsedFile, given, targets

_COMPILES = COMPILES | {"replicax.DataParallel", "rx.DataParallel"}


def check_frozen(program: ParsedFile, report: Report) -> None:
    """Report what a compiled function reads of its surroundings, and what changes there later."""
    for scope in program.nodes:
        if not isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(_own(scope))
        assigned = [(name, statement) for statement in nodes for name in targets(statement)]
        loops = [node for node in nodes if isinstance(node, LOOPS)]
        for function in nodes:
            if not isinstance(function, ast.FunctionDef):
                continue
            used = _compiled(function, nodes, program)
            read = free_names(function) if used else set()
            for name, statement in assigned:
                if name in read and _runs_after(function, statement, used, loops):
                    report.add(
                        "frozen-value",
                        statement,
                        f"{function.name}, which is compiled, read {name} when it was first "
                        "called, and keeps that value",
                        f"hand {name} to it as an argument; in a loss, rx.Shared({name}) in the "
                        "batch, or rx.step_number() for a schedule",
                        WARNING,
                    )


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, without those of the functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            yield from _own(child)


def free_names(function: Function) -> set[str]:
    """Return the names that a function reads and does not assign."""
    nodes = list(ast.walk(function))
    bound = {each.arg for each in nodes if isinstance(each, ast.arg)}
    bound |= {each.name for each in nodes if isinstance(each, ast.FunctionDef)}
    parts = [function.body] if isinstance(function, ast.Lambda) else function.body
    body = [node for part in parts for node in ast.walk(part) if isinstance(node, ast.Name)]
    bound |= {node.id for node in body if not isinstance(node.ctx, ast.Load)}
    return {node.id for node in body} - bound


def _compiled(
    function: ast.FunctionDef, nodes: list[ast.AST], program: ParsedFile
) -> list[ast.AST]:
    """Return where a function is used once compiled; nothing if it never is.

    By its own name if it is decorated so, else by the name of what a compiler made of it.
    """
    compiled = {program.called(each) for each in function.decorator_list} & _COMPILES
    names = {function.name} if compiled else set()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            names_given = {getattr(each, "id", "") for each in given(node.value)}
            if function.name in names_given and program.called(node.value) in _COMPILES:
                names |= set(targets(node))
    return [
        node
        for node in nodes
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)
    ]


def _runs_after(
    function: ast.FunctionDef,
    statement: ast.AST,
    used: Sequence[ast.AST],
    loops: Sequence[ast.AST],
) -> bool:
    """Return whether a function has run before a statement, or is made before it, and runs after.

    By their lines: in a loop around the statement, every use comes after it too.
    """
    place = _line(statement)
    around = [loop for loop in loops if _within(loop, place)]
    if any(_within(loop, _line(function)) for loop in around):
        return False  # made anew at each turn
    if place < _line(function) and not around:
        return False
    lines = [_line(node) for node in used]
    again = any(_within(loop, line) for loop in around for line in lines)
    return again or (any(line < place for line in lines) and any(line > place for line in lines))


def _within(loop: ast.AST, line: int) -> bool:
    return _line(loop) <= line <= (getattr(loop, "end_lineno", None) or line)


def _line(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 1))

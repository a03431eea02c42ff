"""Rule on variables that a compiled function captures and that are assigned again later."""

import ast
from collections.abc import Iterator, Sequence

from replicax.lint.parsed import (
    COMPILES,
    WARNING,
    Function,
    LoopNode,
    ParsedFile,
    free_names,
    given,
    line_of,
    targets,
)

_COMPILES = COMPILES | {"replicax.DataParallel", "rx.DataParallel"}


def check_frozen(program: ParsedFile) -> None:
    """Report variables that a compiled function captures and that change later."""
    for scope in program.nodes:
        if not isinstance(scope, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(_own(scope))
        assigned = [(name, statement) for statement in nodes for name in targets(statement)]
        loops = [node for node in nodes if isinstance(node, LoopNode)]
        for function in nodes:
            if not isinstance(function, ast.FunctionDef):
                continue
            used = _compiled(function, nodes, program)
            read = free_names(function) if used else set()
            for name, statement in assigned:
                if name in read and _runs_after(function, statement, used, loops):
                    program.report(
                        "frozen-value",
                        statement,
                        f"{function.name} is compiled and captured {name} when it was first "
                        "called; it keeps that value",
                        f"pass {name} as an argument; in a loss, put rx.Replicated({name}) in the "
                        "batch, or use rx.step_number() for a schedule",
                        WARNING,
                    )


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a scope, excluding nested functions and classes."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, Function | ast.ClassDef):
            yield from _own(child)


def _compiled(
    function: ast.FunctionDef, nodes: list[ast.AST], program: ParsedFile
) -> list[ast.AST]:
    """Return the uses of a function's compiled version; empty if it is never compiled.

    They use its own name if it has a compiling decorator, else the name of the compiled result.
    """
    compiled = any(program.called(each) in _COMPILES for each in function.decorator_list)
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
    function: ast.AST, statement: ast.AST, used: Sequence[ast.AST], loops: Sequence[ast.AST]
) -> bool:
    """Return whether a function runs both before and after a statement.

    Line numbers decide; in a loop around the statement, every use also counts as after it.
    """

    def within(loop: ast.AST, line: int) -> bool:
        return line_of(loop) <= line <= (getattr(loop, "end_lineno", None) or line)

    place, made = line_of(statement), line_of(function)
    lines = [line_of(node) for node in used]
    around = [loop for loop in loops if within(loop, place)]
    if any(within(loop, made) for loop in around) or (place < made and not around):
        return False  # defined anew in each iteration, or defined later
    again = any(within(loop, line) for loop in around for line in lines)
    return again or (any(line < place for line in lines) and any(line > place for line in lines))

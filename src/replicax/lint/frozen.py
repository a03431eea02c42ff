"""Rule on values that a compiled function closes over and that are assigned again later."""

import ast
from collections.abc import Iterator, Sequence

from replicax.lint.finding import WARNING, Report, spot
from replicax.lint.program import Program

_COMPILES = {
    *("jax.jit", "jax.pmap", "jax.shard_map", "jax.experimental.shard_map.shard_map"),
    *("replicax.DataParallel", "rx.DataParallel"),
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)


def check_frozen(program: Program, report: Report) -> None:
    """Report what a compiled function reads of its surroundings, and what changes there later."""
    for scope in program.nodes:
        if not isinstance(scope, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        nodes = list(_own(scope))
        assigned = [(name, statement) for statement in nodes for name in _targets(statement)]
        loops = [node for node in nodes if isinstance(node, _LOOPS)]
        for function in nodes:
            if not isinstance(function, ast.FunctionDef):
                continue
            used = _compiled(function, nodes, program)
            read = _free(function) if used else {}
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
    """The nodes of a scope, without those of the functions and classes in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _own(child)


def _targets(node: ast.AST) -> Iterator[str]:
    """The names that a statement or an expression assigns."""
    targets: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
        targets = [node.target]
    for target in targets:
        for each in ast.walk(target):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                yield each.id


def _free(function: ast.FunctionDef) -> dict[str, ast.Name]:
    """The names that a function reads and does not assign."""
    bound = {argument.arg for argument in ast.walk(function) if isinstance(argument, ast.arg)}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    bound |= {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    inner = [node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)]
    body = {id(node) for part in function.body for node in ast.walk(part)}
    return {
        node.id: node
        for node in names
        if id(node) in body and node.id not in bound and node.id not in inner
    }


def _compiled(function: ast.FunctionDef, nodes: list[ast.AST], program: Program) -> list[ast.AST]:
    """Where a function is used once compiled; nothing if it never is.

    By its own name if it is decorated so, else by the name of what a compiler made of it.
    """

    def compiles(node: ast.AST) -> bool:
        called = node.func if isinstance(node, ast.Call) else node
        if isinstance(node, ast.Call) and program.name(called) == "functools.partial":
            return bool(node.args) and compiles(node.args[0])
        return program.name(called) in _COMPILES

    names = {function.name} if any(map(compiles, function.decorator_list)) else set()
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            handed = any(isinstance(each, ast.Name) and each.id == function.name for each in given)
            if handed and compiles(call):
                names |= set(_targets(node))
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
    """Whether the function has run before a statement, or is made before it, and runs after it."""
    place = spot(statement).line
    around = [loop for loop in loops if _within(loop, place)]
    if any(_within(loop, spot(function).line) for loop in around):
        return False  # made anew at each turn
    if place < spot(function).line and not around:
        return False
    earlier = [node for node in used if spot(node).line < place]
    later = [node for node in used if spot(node).line > place]
    again = [node for loop in around for node in used if _within(loop, spot(node).line)]
    return bool(again) or bool(earlier and later)


def _within(loop: ast.AST, line: int) -> bool:
    return spot(loop).line <= line <= (getattr(loop, "end_lineno", None) or line)

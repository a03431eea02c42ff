"""What a call returns."""

import ast
from typing import TYPE_CHECKING, Any

from replicax.verify.rules import library, methods
from replicax.verify.rules.gradients import differentiate
from replicax.verify.rules.keys import check_keywords
from replicax.verify.rules.scope import Parallel, Scope
from replicax.verify.rules.value import (
    Differentiated,
    Function,
    Known,
    Made,
    Method,
    Partial,
    Value,
    packed,
    unknown,
)

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine

_SOMEWHERE = ast.copy_location(ast.Constant(None), ast.Constant(None, lineno=1, col_offset=0))


def call(
    machine: "Machine",
    function: Value,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
    scope: Scope | None = None,
) -> Value:
    """The result of calling `function` at `node`."""
    check_keywords(machine, node, keywords, function)
    return call_callee(machine, function.callee, args, keywords, node)


def call_callee(
    machine: "Machine",
    callee: Any,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST = _SOMEWHERE,
) -> Value:
    """The same, where only the callee is at hand."""
    from replicax.verify.rules.parallels import call_parallel

    if isinstance(callee, Function):
        return machine.invoke(callee, args, keywords)
    if isinstance(callee, Known):
        return library.call_known(machine, callee.name, args, keywords, node)
    if isinstance(callee, Partial):
        merged = {**callee.keywords, **keywords}
        return call_callee(machine, callee.callee, [*callee.args, *args], merged, node)
    if isinstance(callee, Differentiated):
        return differentiate(machine, callee, args, keywords)
    if isinstance(callee, Parallel):
        return call_parallel(machine, callee, args, keywords, node)
    if isinstance(callee, Method):
        return methods.call_method(machine, callee, args, keywords, node)
    if isinstance(callee, Made):
        return _construct(machine, callee.name, args, keywords)
    return unknown([*args, *keywords.values()])


def _construct(
    machine: "Machine", name: str, args: list[Value], keywords: dict[str, Value]
) -> Value:
    """An instance of a class of the file; of a dataclass or named tuple, with its fields."""
    from replicax.verify.rules.expressions import find_method

    made = Value(instance=name)
    init = find_method(machine, name, "__init__")
    if init is not None:
        machine.invoke(Function(init, machine.module, name, made), args, keywords)
        return made
    fields = [
        each.target.id
        for each in machine.classes[name].body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    ]
    items = {**dict(zip(fields, args, strict=False)), **keywords}
    return packed(items, instance=name) if items else made

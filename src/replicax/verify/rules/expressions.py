"""What is known of an expression."""

import ast
import re
from typing import TYPE_CHECKING, Any

from replicax.verify.rules import calls
from replicax.verify.rules.arithmetic import binary
from replicax.verify.rules.finding import spot
from replicax.verify.rules.loops import check_fetch
from replicax.verify.rules.names import canonical
from replicax.verify.rules.scope import Scope
from replicax.verify.rules.value import (
    NOTHING,
    Function,
    Known,
    Method,
    Partial,
    Value,
    derived,
    merged,
    packed,
    without_gradient,
)

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine

_DEVICES = re.compile(
    r"^(n|num|number_of)_?(local_|global_)?(devices?|replicas?|gpus?|tpus?|cores?)$"
)
_SIZES = {"shape", "size", "ndim", "dtype", "sharding"}


def evaluate(machine: "Machine", node: ast.expr, scope: Scope) -> Value:
    """What is known of `node` in `scope`."""
    visit = _VISITS.get(type(node))
    if visit is not None:
        result: Value = visit(machine, node, scope)
        return result
    values = [machine.value(child, scope) for child in _children(node)]
    return derived(values)


def _children(node: ast.AST) -> list[ast.expr]:
    return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]


def _constant(machine: "Machine", node: ast.Constant, scope: Scope) -> Value:
    return Value(varies=False, constant=node.value, spec="none" if node.value is None else "")


def _name(machine: "Machine", node: ast.Name, scope: Scope) -> Value:
    held = scope.find(node.id, machine.replica)
    if held is None:
        name = machine.imports.root(node.id)
        known = Known(canonical(name)) if name else None
        held = Value(callee=known, name=canonical(name))
    if _DEVICES.match(node.id.lower()) and not held.devices:
        held = held.but(devices=True)
    if re.search(r"(^|_)mesh$", node.id) and held.callee is None:
        held = held.but(mesh=True)
    return held


def _attribute(machine: "Machine", node: ast.Attribute, scope: Scope) -> Value:
    base = machine.value(node.value, scope)
    if base.name:
        name = canonical(f"{base.name}.{node.attr}")
        return Value(callee=Known(name), name=name, varies=False)
    if base.instance:
        held = machine.attributes.get((base.instance, node.attr))
        if held is not None:
            return held
        method = find_method(machine, base.instance, node.attr)
        if method is not None:
            return Value(callee=Function(method, machine.module, base.instance, base))
    if base.items is not None and node.attr in base.items:
        return base.items[node.attr]
    mesh = bool(re.search(r"(^|_)mesh$", node.attr)) and machine.replica is None
    if node.attr in _SIZES:
        size = derived([base])
        return Value(
            size=True, shape_of=size.roots, roots=size.roots, varies=False, devices=base.devices
        )
    whole = derived([base])
    roots = frozenset(_longer(root, node.attr) for root in whole.roots)
    equal_everywhere = node.attr in ("step", "count")
    return whole.but(
        roots=roots,
        reduced=False,
        key=bool(re.search(r"(^|_)(rng|key)$", node.attr)),
        callee=Method(base, node.attr),
        varies=False if equal_everywhere else whole.varies,
        stacked=base.stacked,
        devices=bool(_DEVICES.match(node.attr.lower())),
        mesh=mesh,
    )


def _longer(root: str, part: str) -> str:
    return f"{root}.{part}" if root.count(".") < 4 else root


def find_method(machine: "Machine", owner: str, name: str) -> Any:
    """The definition of a method in a class of the file or its bases in the file."""
    node = machine.classes.get(owner)
    if node is None:
        return None
    for each in node.body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name:
            return each
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id != owner:
            found = find_method(machine, base.id, name)
            if found is not None:
                return found
    return None


def _subscript(machine: "Machine", node: ast.Subscript, scope: Scope) -> Value:
    base = machine.value(node.value, scope)
    index = machine.value(node.slice, scope)
    if base.size:
        return base.but(constant=None)
    if isinstance(index.constant, int) and not isinstance(index.constant, bool):
        if base.items is not None and index.constant in base.items:
            return base.items[index.constant]
        if base.stacked and not base.opaque:
            if base.stacked == "single":
                _report_single(machine, node)
            elif index.constant == 0:
                machine.gathered.append(node)
            return base.but(stacked="")
        return item(base, index.constant)
    if isinstance(index.constant, str):
        return item(base, index.constant)
    both = derived([base, index])
    return both.but(
        varies=derived([base]).varies if index.varies is None else both.varies,
        roots=derived([base]).roots,
        callee=base.callee if isinstance(base.callee, Known) else None,
        key=base.key,
        target=base.target,
    )


def _report_single(machine: "Machine", node: ast.AST) -> None:
    machine.report.add(
        "index-not-stacked",
        spot(node),
        "out_axes=None returns this output once, with no axis of replicas: [0] takes its first "
        'element or fails with "Too many indices"',
        "use it as it is, without [0]",
    )


def item(value: Value, place: Any) -> Value:
    """What is at `place` of a tuple, dictionary or array."""
    if value.items is not None:
        if place in value.items:
            return value.items[place]
        return derived([value])
    roots = value.roots
    if isinstance(place, str):
        roots = frozenset(_longer(root, place) for root in roots)
    key = value.key or (isinstance(place, str) and bool(re.search(r"(^|_)(rng|key)s?$", place)))
    return derived([value]).but(
        roots=roots,
        stacked=value.stacked,
        key=key,
        opaque=False,
        spec=value.spec,
        callee=value.callee if isinstance(value.callee, Known) else None,
        constant=None,
    )


def with_item(held: Value, place: ast.expr, value: Value) -> Value:
    """`held` after `held[place] = value`."""
    if isinstance(place, ast.Constant) and (held.items is not None or held == NOTHING):
        return packed({**(held.items or {}), place.value: value})
    if isinstance(place, ast.Constant):
        return held
    return merged(held, held.but(loops=held.loops | value.loops))


def _tuple(machine: "Machine", node: ast.Tuple | ast.List, scope: Scope) -> Value:
    values = [machine.value(each, scope) for each in node.elts]
    if any(isinstance(each, ast.Starred) for each in node.elts):
        return derived(values).but(spec=_spec(values))
    if not values:
        return Value(varies=False)
    return packed(dict(enumerate(values)), spec=_spec(values))


def _spec(values: list[Value]) -> str:
    specs = {value.spec for value in values if value.spec}
    return specs.pop() if len(specs) == 1 else ""


def _dict(machine: "Machine", node: ast.Dict, scope: Scope) -> Value:
    items: dict[Any, Value] = {}
    for key, each in zip(node.keys, node.values, strict=True):
        value = machine.value(each, scope)
        if not isinstance(key, ast.Constant):
            others = [*items.values(), value]
            return derived(others)
        items[key.value] = value
    return packed(items, spec=_spec(list(items.values()))) if items else Value(varies=False)


def _binary(machine: "Machine", node: ast.BinOp, scope: Scope) -> Value:
    left, right = machine.value(node.left, scope), machine.value(node.right, scope)
    return binary(machine, node, left, right)


def _unary(machine: "Machine", node: ast.UnaryOp, scope: Scope) -> Value:
    value = machine.value(node.operand, scope)
    if isinstance(node.op, ast.Not):
        return without_gradient(derived([value]))
    if isinstance(node.op, ast.USub) and isinstance(value.constant, int | float):
        return value.but(constant=-value.constant)
    return value


def _compare(machine: "Machine", node: ast.Compare, scope: Scope) -> Value:
    values = [machine.value(each, scope) for each in (node.left, *node.comparators)]
    return without_gradient(derived(values)).but(differentiated=False)


def _choice(machine: "Machine", node: ast.IfExp, scope: Scope) -> Value:
    machine.value(node.test, scope)
    name = compared_with_none(node.test)
    known = scope.find(name, machine.replica) if name else None
    if known is not None and known.all_grads:
        return machine.value(node.orelse, scope)
    if machine.loops:
        machine.loops[-1].guards += 1
    first, second = machine.value(node.body, scope), machine.value(node.orelse, scope)
    if machine.loops:
        machine.loops[-1].guards -= 1
    return merged(first, second)


def compared_with_none(test: ast.expr) -> str:
    """`name` in `name is None`."""
    if (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and isinstance(test.ops[0], ast.Is)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    ):
        return test.left.id
    return ""


def _lambda(machine: "Machine", node: ast.Lambda, scope: Scope) -> Value:
    loop = machine.loops[-1].number if machine.loops else 0
    return Value(callee=Function(node, scope, loop=loop))


def _named(machine: "Machine", node: ast.NamedExpr, scope: Scope) -> Value:
    value = machine.value(node.value, scope)
    machine.bind(node.target, value, scope)
    return value


def _comprehension(
    machine: "Machine", node: ast.ListComp | ast.GeneratorExp | ast.SetComp, scope: Scope
) -> Value:
    inner = _generators(machine, node.generators, scope)
    return derived([machine.value(node.elt, inner)])


def _dict_comprehension(machine: "Machine", node: ast.DictComp, scope: Scope) -> Value:
    inner = _generators(machine, node.generators, scope)
    machine.value(node.key, inner)
    value = machine.value(node.value, inner)
    return derived([value]).but(stacked=value.stacked)


def _generators(machine: "Machine", generators: list[ast.comprehension], scope: Scope) -> Scope:
    inner = Scope(scope, machine.replica)
    for each in generators:
        over = machine.value(each.iter, inner)
        element = derived([over]).but(stacked=over.stacked, form=over.form)
        machine.bind(each.target, element, inner)
        for test in each.ifs:
            machine.value(test, inner)
    return inner


def _call(machine: "Machine", node: ast.Call, scope: Scope) -> Value:
    function = machine.value(node.func, scope)
    args: list[Value] = []
    for each in node.args:
        value = machine.value(each, scope)
        if isinstance(each, ast.Starred):
            if value.items is not None:
                args.extend(value.items.values())
            else:
                args.append(derived([value]).but(name="*"))
        else:
            args.append(value)
    keywords = {each.arg or "**": machine.value(each.value, scope) for each in node.keywords}
    check_fetch(machine, node, function, args, keywords)
    return calls.call(machine, function, args, keywords, node, scope)


def decorated(
    machine: "Machine", maker: Value, function: Value, node: ast.expr, scope: Scope
) -> Value:
    """`maker(function)`, as a decorator does; what is not known leaves the function as it is."""
    if isinstance(maker.callee, Known | Partial):
        result = calls.call(machine, maker, [function], {}, node, scope)
        if result.callee is not None:
            return result
    return function


_VISITS: dict[type[ast.expr], Any] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Tuple: _tuple,
    ast.List: _tuple,
    ast.Dict: _dict,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.Compare: _compare,
    ast.IfExp: _choice,
    ast.Lambda: _lambda,
    ast.NamedExpr: _named,
    ast.ListComp: _comprehension,
    ast.SetComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.DictComp: _dict_comprehension,
    ast.Call: _call,
}

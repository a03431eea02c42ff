"""Sums, products and quotients of values, as the rules see them."""

import ast
import dataclasses
import re
from typing import TYPE_CHECKING

from replicax.verify.rules.finding import Spot, spot
from replicax.verify.rules.gradients import mean_of_means, update
from replicax.verify.rules.value import (
    AVERAGE,
    MASKED,
    MEAN,
    SCALED,
    SUM,
    SUMMED,
    TOTAL,
    Gradient,
    Value,
    changed_gradients,
    derived,
    without_gradient,
)

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine

_RATE = re.compile(r"(^|[._])(lr|learning_rate|step_size|eta|alpha|rate)", re.IGNORECASE)
_DATA = re.compile(
    r"^(self\.)?(x|xs|x_\w+|img|images?|inputs?|batch.*|z|latents?|obs\w*|adv\w*|delta|perturb\w*)$"
)
_OPERATIONS: dict[str, type[ast.operator]] = {
    "add": ast.Add,
    "subtract": ast.Sub,
    "sub": ast.Sub,
    "multiply": ast.Mult,
    "mul": ast.Mult,
    "divide": ast.Div,
    "true_divide": ast.Div,
    "truediv": ast.Div,
    "div": ast.Div,
}


def binary(machine: "Machine", node: ast.BinOp, left: Value, right: Value) -> Value:
    """`left op right`."""
    return combined(machine, node.op, left, right, spot(node), node.left, node.right)


def named_operation(
    machine: "Machine", name: str, args: list[Value], node: ast.AST
) -> Value | None:
    """The same for `jnp.add` or `operator.add`; None where `name` is no such function."""
    operation = _OPERATIONS.get(name)
    if operation is None or len(args) != 2:
        return None
    return combined(machine, operation(), args[0], args[1], spot(node), None, None)


def combined(
    machine: "Machine",
    operation: ast.operator,
    left: Value,
    right: Value,
    where: Spot,
    left_node: ast.expr | None,
    right_node: ast.expr | None,
) -> Value:
    """The result of one arithmetic operation."""
    value = derived([left, right])
    if isinstance(operation, ast.Add) and left.items is not None and not value.grads:
        # `(devices, -1) + x.shape[1:]`: what comes after the first items is left open.
        return value.but(items=left.items)
    devices = left.devices and right.devices
    value = value.but(size=left.size or right.size, target=left.target or right.target)
    if left.size and right.size:
        value = value.but(shape_of=left.shape_of | right.shape_of)
    if isinstance(operation, ast.Div | ast.FloorDiv):
        return _quotient(value, left, right, where)
    if isinstance(operation, ast.Mult):
        names = [ast.unparse(each) for each in (left_node, right_node) if each is not None]
        return _product(value, left, right, names).but(devices=devices)
    if isinstance(operation, ast.Sub) and right.all_grads and not left.all_grads:
        # `p - lr * g` is an update, unless it is an attack on the inputs.
        if left_node is not None and _DATA.match(ast.unparse(left_node)):
            return without_gradient(value)
        return update(machine, left, right, where)
    if isinstance(operation, ast.Add | ast.Sub):
        return _sum(machine, value, left, right, where)
    return value


def _is_literal(value: Value) -> bool:
    return isinstance(value.constant, int | float)


def scaled(one: Gradient) -> Gradient:
    """A gradient divided by something: a sum over replicas or micro-batches becomes a mean."""
    state = MEAN if one.state in (SUM, SUMMED) else one.state
    loss = MASKED if one.loss == MASKED else SCALED
    return dataclasses.replace(one, state=state, accumulated=None, loss=loss)


def _quotient(value: Value, left: Value, right: Value, where: Spot) -> Value:
    if left.all_grads and not right.all_grads:
        return changed_gradients(left, scaled)
    # By 2 as in half the squares; by another number it may be that of devices or micro-batches.
    literal = right.constant in (1, 2)
    if _masked(left, right):
        return value.but(form=MASKED, division=where)
    if left.form == TOTAL and right.size and not right.devices:
        return value.but(form=AVERAGE)
    if left.form in (AVERAGE, MASKED) and literal:
        return value.but(form=left.form, division=left.division)
    return value.but(form=SCALED if left.form else "")


def _masked(left: Value, right: Value) -> bool:
    """`(loss * mask).sum() / mask.sum()`, each of this replica's rows only."""
    return (
        left.form == TOTAL
        and right.form == TOTAL
        and bool(right.roots)
        and right.roots <= left.roots
        and not (right.reduced or right.differentiated or left.reduced)
        and right.varies is not False
    )


def _product(value: Value, left: Value, right: Value, names: list[str]) -> Value:
    if value.grads:
        other = right if left.all_grads else left
        if _is_literal(other) or any(_RATE.search(name) for name in names):
            return value
        return changed_gradients(value, scaled)
    for one, other in ((left, right), (right, left)):
        if one.form and _is_literal(other) and (other.constant == 0.5 or abs(other.constant) >= 1):
            return value.but(form=one.form, division=one.division)
    return value.but(form=SCALED if left.form or right.form else "")


def _sum(machine: "Machine", value: Value, left: Value, right: Value, where: Spot) -> Value:
    twice = {one.spot for one in left.all_grads} & {one.spot for one in right.all_grads}

    def added(one: Gradient) -> Gradient:
        if one.spot not in twice:
            return one
        if one.loss == MASKED and one.division is not None:
            mean_of_means(machine, one.division, "micro-batches")
        return dataclasses.replace(one, accumulated=where)

    if value.grads:
        best = changed_gradients(value, added)
        # An accumulated gradient takes the place of its last term.
        spots = {one.spot for one in best.grads if one.accumulated}
        kept = (one for one in best.grads if one.accumulated or one.spot not in spots)
        return best.but(grads=frozenset(kept))
    for form in (MASKED, AVERAGE, TOTAL, SCALED):
        for one in (left, right):
            if one.form == form:
                return value.but(form=form, division=one.division)
    return value

"""What a call of a method returns, where the file does not define it, or defines it once."""

import ast
from typing import TYPE_CHECKING

from replicax.verify.rules import batches, reductions
from replicax.verify.rules.finding import spot
from replicax.verify.rules.gradients import update, update_in_place
from replicax.verify.rules.norms import check_statistics
from replicax.verify.rules.value import LOCAL, Function, Gradient, Method, Value, derived, unknown

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine

_KEEPS = {"astype", "copy", "block_until_ready", "replace", "_replace", "squeeze", "ravel", "get"}
_KEEPS |= {"set", "add", "items", "values", "keys", "pop", "transpose", "flatten", "unfreeze"}
_COMMON = {"update", "init", "apply", "get", "replace", "items", "append", "step", "run", "mean"}
_COMMON |= {"__call__", "sum", "log", "write", "create", "reshape", "save", "close", "next"}


def call_method(
    machine: "Machine",
    method: Method,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    """The result of `receiver.name(*args, **keywords)`."""
    name, receiver = method.name, method.receiver
    values = [receiver, *args, *keywords.values()]
    check_statistics(machine, keywords, node)
    defined = machine.methods.get(name, [])
    if len(defined) == 1 and name not in _COMMON and not receiver.size:
        from replicax.verify.rules.expressions import find_method

        found = find_method(machine, defined[0], name)
        owner = receiver.but(instance=defined[0])
        return machine.invoke(Function(found, machine.module, defined[0], owner), args, keywords)
    if name in ("mean", "sum"):
        return reductions.reduction(name, receiver, args, keywords, node)
    if name == "reshape":
        batches.check_reshape(machine, receiver, args, node)
        return derived([receiver]).but(form=receiver.form)
    if name == "apply_gradients":
        return _apply_gradients(machine, receiver, args, keywords, node)
    if name == "update":
        return _update(machine, receiver, args, keywords, node)
    if name in ("max", "min", "std", "var", "item", "tolist", "any", "all", "argmax", "norm"):
        value = derived([receiver])
        return value.but(grads=frozenset(), updates=frozenset(), loops=frozenset())
    if name in _KEEPS:
        return derived(values).but(
            form=receiver.form, division=receiver.division, stacked=receiver.stacked
        )
    return unknown(values)


def _apply_gradients(
    machine: "Machine",
    receiver: Value,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    grads = keywords.get("grads", args[0] if args else Value())
    return update(machine, receiver, _or_local(machine, grads, node), spot(node))


def _or_local(machine: "Machine", grads: Value, node: ast.AST) -> Value:
    """In a pmap without an axis name every gradient is local, wherever it comes from."""
    replica = machine.replica
    if replica is None or not replica.nameless or grads.all_grads:
        return grads
    return Value(grads=frozenset([Gradient(spot(node), state=LOCAL)]))


def _update(
    machine: "Machine",
    receiver: Value,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    """Optax's `tx.update(grads, opt_state, params)`, or NNX's `optimizer.update(model, grads)`."""
    values = [*args, *keywords.values()]
    grads = [value for value in values if value.all_grads]
    if not grads:
        return derived([receiver, *values])
    if getattr(machine.statement_of, "value", None) is node and isinstance(
        machine.statement_of, ast.Expr
    ):
        update_in_place(machine, grads[0], spot(node))
        return Value(varies=False)
    rest = derived(value.but(grads=frozenset()) for value in values if not value.all_grads)
    return Value(items={0: derived(grads[:1]), 1: rest})

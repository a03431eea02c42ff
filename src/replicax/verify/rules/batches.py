"""Rules on how a batch is split: the remainder, and batches that are not split at all."""

import ast
import re
from typing import TYPE_CHECKING

from replicax.verify.rules.finding import WARNING, spot
from replicax.verify.rules.names import BATCH
from replicax.verify.rules.scope import JIT, Parallel
from replicax.verify.rules.value import NOTHING, Function, Partial, Value, derived, mapped

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine


def check_reshape(machine: "Machine", value: Value, shape: list[Value], node: ast.AST) -> None:
    """Report `reshape(devices, -1, ...)` of a batch whose size nothing makes divisible."""
    # Keys are as many as somebody split them into.
    keys = value.key or re.search(r"key|rng", ast.unparse(node))
    if machine.divides or machine.replica is not None or keys:
        return
    if len(shape) == 1 and shape[0].items is not None:
        shape = list(shape[0].items.values())
    if len(shape) < 2 or not shape[0].devices:
        return
    if shape[1].constant != -1 and not _is_quotient(node):
        return
    machine.report.add(
        "remainder",
        spot(node),
        "a batch that the devices do not divide fails here, as the last one of an epoch may",
        "pad it and weight the padding 0, or let the loader drop the remainder (drop_remainder)",
        WARNING,
    )


def _is_quotient(node: ast.AST) -> bool:
    """Whether a shape is written with `batch // devices`."""
    return any(isinstance(each, ast.FloorDiv) for each in ast.walk(node))


def device_put(
    machine: "Machine", args: list[Value], keywords: dict[str, Value], node: ast.AST
) -> Value:
    """`jax.device_put(value, sharding)`: remembers whether it is split."""
    if not args:
        return NOTHING
    sharding = keywords.get("device", args[1] if len(args) > 1 else NOTHING)
    spec = sharding.spec
    value = args[0]
    name = _written(node)
    target = name if BATCH.match(name) or value.target else ""
    if value.items is not None:
        return mapped(value, lambda leaf: leaf.but(spec=spec, target=leaf.target or target))
    return derived([value]).but(spec=spec, target=target, loops=value.loops, key=value.key)


def _written(node: ast.AST) -> str:
    """The name that is put."""
    first = node.args[0] if isinstance(node, ast.Call) and node.args else None
    return first.id if isinstance(first, ast.Name) else ""


def check_inputs(machine: "Machine", made: Parallel, args: list[Value], node: ast.AST) -> None:
    """Report a batch that every device gets whole."""
    # Outside a loop it may well be the reference that the parallel form is held against.
    if made.kind != JIT or machine.constrains or not machine.loops:
        return
    given = [leaf for arg in args for leaf in arg.leaves]
    if any(leaf.spec == "split" for leaf in given):
        return
    written = node.args if isinstance(node, ast.Call) else []
    for arg, expression in zip(args, written, strict=False):
        if isinstance(expression, ast.Starred):
            return
        name = expression.id if isinstance(expression, ast.Name) else ""
        whole = bool(arg.leaves) and all(leaf.spec == "replicated" for leaf in arg.leaves)
        if whole and BATCH.match(name):
            _report(machine, node)
            return


def check_in_shardings(machine: "Machine", made: Parallel) -> None:
    """Report `in_shardings` that give every device the whole of an argument called a batch."""
    shardings = made.options.get("in_shardings")
    callee = made.callee
    while isinstance(callee, Partial) and not callee.args:
        callee = callee.callee
    if shardings is None or machine.constrains or not isinstance(callee, Function):
        return
    names = [each.arg for each in callee.node.args.args]
    if callee.owner:
        names = names[1:]
    specs = shardings.items or {}
    if any(leaf.spec == "split" for leaf in shardings.leaves):
        return
    for place, name in enumerate(names):
        if specs and specs.get(place, NOTHING).spec == "replicated" and BATCH.match(name):
            _report(machine, made.node)
            return


def _report(machine: "Machine", node: ast.AST) -> None:
    machine.report.add(
        "batch-not-sharded",
        spot(node),
        "the batch is on every device whole (PartitionSpec()): each of them computes all of it, "
        "and more devices make it no faster",
        "jax.device_put(batch, NamedSharding(mesh, P('data')))",
        WARNING,
    )

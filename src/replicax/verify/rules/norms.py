"""Rule on BatchNorm whose statistics differ between replicas."""

import ast
from typing import TYPE_CHECKING

from replicax.verify.rules.finding import spot
from replicax.verify.rules.names import Imports
from replicax.verify.rules.value import Value

if TYPE_CHECKING:
    from replicax.verify.rules.machine import Machine

_NORMS = {"flax.linen.BatchNorm", "flax.nnx.BatchNorm", "haiku.BatchNorm"}
_AXES = {"axis_name", "cross_replica_axis", "cross_replica_axis_index_groups"}
_STATISTICS = ("batch_stats", "batch_statistics", "model_state", "bn_state")


def check_statistics(machine: "Machine", keywords: dict[str, Value], node: ast.AST) -> None:
    """Remember statistics that go into the state as this replica has them."""
    value = keywords.get("batch_stats")
    if machine.replica is None or value is None:
        return
    if not any(leaf.reduced for leaf in value.leaves) and value.varies is not False:
        machine.replica.statistics.append(spot(node))


def check_norms(machine: "Machine", imports: Imports) -> None:
    """Report BatchNorm without an axis in a file whose step runs per replica."""
    steps = [
        made
        for made in machine.parallels
        if made.replica is not None and machine.differentiates.get(made)
    ]
    if not steps or not machine.statistics or _averages_statistics(machine.tree, imports):
        return
    for node in ast.walk(machine.tree):
        if not isinstance(node, ast.Call):
            continue
        made_partial = imports.written(node.func) == "functools.partial" and bool(node.args)
        called = node.args[0] if made_partial else node.func
        if imports.written(called) not in _NORMS:
            continue
        options = {each.arg for each in node.keywords}
        if options & _AXES or None in options:
            continue
        machine.report.add(
            "local-batch-norm",
            spot(node),
            "each replica normalizes by its own rows and keeps its own running statistics, which "
            "drift apart",
            "BatchNorm(axis_name=...) with the axis of the step, and pmean of batch_stats before "
            "they are saved",
        )


def _averages_statistics(tree: ast.AST, imports: Imports) -> bool:
    """Whether anything in the file averages something over replicas that may be statistics."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node)
        if any(name in text for name in _STATISTICS) and (
            "pmean" in text or "cross_replica" in text or "sync" in text
        ):
            return True
        if imports.written(node.func) == "jax.pmap" and "pmean" in text and "lambda" in text:
            return True
    return False

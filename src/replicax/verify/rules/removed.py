"""Rule on names that JAX no longer has, or that it has better ones for."""

import ast
from collections.abc import Collection

from replicax.verify.rules.finding import ERROR, NOTE, Severity, spot
from replicax.verify.rules.names import Imports, canonical, walked
from replicax.verify.rules.report import Report

_PUT = "jax.device_put(value, jax.NamedSharding(mesh, P()))"
_GONE = {
    "jax.device_put_replicated": f"{_PUT} with jit or shard_map",
    "jax.device_put_sharded": "jax.device_put(numpy.stack(shards), jax.NamedSharding(mesh, "
    "P('data')))",
    "jax.sharding.PmapSharding": "jax.NamedSharding(mesh, P('data'))",
    "jax.sharding.PositionalSharding": "jax.NamedSharding(mesh, P('data'))",
    "jax.sharding.use_mesh": "jax.set_mesh(mesh)",
    "jax.experimental.maps": "jax.shard_map, and jax.sharding.Mesh",
    "jax.experimental.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.experimental.pjit.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.experimental.global_device_array": "jax.make_array_from_callback",
    "jax.experimental.pjit.with_sharding_constraint": "jax.lax.with_sharding_constraint",
    "jax.interpreters.pxla.PartitionSpec": "jax.sharding.PartitionSpec",
    "jax.interpreters.pxla.Mesh": "jax.sharding.Mesh",
    "jax.interpreters.sharded_jit": "jax.jit with in_shardings",
    "jax.lax.pvary": "jax.lax.pcast(value, axis_name, to='varying')",
    "jax.tree_map": "jax.tree.map",
    "jax.tree_multimap": "jax.tree.map",
    "jax.tree_leaves": "jax.tree.leaves",
    "jax.tree_flatten": "jax.tree.flatten",
    "jax.tree_unflatten": "jax.tree.unflatten",
    "jax.soft_pmap": "jax.shard_map",
    "jax.xmap": "jax.shard_map",
}
_OLD = {
    "jax.experimental.shard_map": ("deprecated since JAX 0.8", "jax.shard_map, with check_vma"),
    "flax.jax_utils.replicate": ("stacks a copy per device, which only pmap needs", _PUT),
    "flax.jax_utils.unreplicate": (
        "is for outputs of pmap; those of jit over a mesh need no first replica",
        "step = jax.jit(...) over a mesh, and the arrays as they are",
    ),
}
_KEYWORDS = {
    ("jax.shard_map", "check_rep"): "check_vma",
    ("jax.experimental.shard_map.shard_map", "check_vma"): "check_rep",
    ("jax.shard_map", "auto"): "axis_names",
}


def check_removed(tree: ast.AST, imports: Imports, report: Report) -> None:
    """Report removed and old names, wherever the file uses them or imports them."""
    used = {node: imports.written(node) for node in walked(tree)}
    for node, name in used.items():
        gone = _longest(name, _GONE)
        if gone:
            _gone(report, gone, node)
    for name, statement in imports.statements:
        gone = _longest(name, _GONE)
        if gone:
            _gone(report, gone, statement)
        old = _longest(name, _OLD)
        if old:
            _old(report, old, statement)
    for node, name in used.items():
        if isinstance(node, ast.Attribute) and (old := _longest(name, _OLD)):
            _old(report, old, node)
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            _check_call(call, imports, report)


def _longest(name: str, known: Collection[str]) -> str:
    """The known name that `name` is, or is inside of."""
    while name:
        if name in known:
            return name
        name = name.rpartition(".")[0]
    return ""


def _gone(report: Report, name: str, node: ast.AST) -> None:
    _add(report, "removed-api", node, f"JAX has no {name} any more", _GONE[name], ERROR)


def _old(report: Report, name: str, node: ast.AST) -> None:
    reason, fix = _OLD[name]
    _add(report, "old-api", node, f"{name.removeprefix('flax.')} {reason}", fix, NOTE)


def _add(
    report: Report, rule: str, node: ast.AST, reason: str, fix: str, severity: Severity
) -> None:
    report.add(rule, spot(node), reason, f"write {fix}", severity)


def _check_call(node: ast.Call, imports: Imports, report: Report) -> None:
    called = node.func
    keywords = {each.arg for each in node.keywords}
    if imports.written(called) == "functools.partial" and node.args:
        called = node.args[0]
    name = canonical(imports.written(called))
    if imports.written(called) == "jax.experimental.shard_map":
        report.add(
            "removed-api",
            spot(node),
            "jax.experimental.shard_map is a module: calling it fails",
            "write jax.shard_map",
        )
    for (function, keyword), instead in _KEYWORDS.items():
        if name == function and keyword in keywords:
            report.add(
                "removed-api",
                spot(node),
                f"{function} has no {keyword}: this call fails",
                f"write {instead} there",
            )

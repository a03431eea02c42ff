"""Rule on batches that are split by a reshape which only some sizes survive."""

import ast

from replicax.lint.finding import WARNING, Report
from replicax.lint.parsed import KEY, ParsedFile, names_in, targets

_COUNTS = {"jax.device_count", "jax.local_device_count"}
_DEVICES = {"jax.devices", "jax.local_devices"}
_DROPS = {"drop_remainder", "drop_last"}
_DIVIDING = {"pad", "pad_shard_unpad", "divmod", "gcd"}


def check_reshapes(program: ParsedFile, report: Report) -> None:
    """Report `reshape(devices, -1, ...)` in a file that makes no batch divisible."""
    if not program.mapped or _divides(program):
        return
    counts = {
        name
        for node in program.nodes
        if isinstance(node, ast.Assign) and _counts_devices(program, node.value, set())
        for name in targets(node)
    }
    for call in program.calls(program.tree):
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "reshape":
            continue
        shape = list(call.args)
        if program.name(call.func) in ("jax.numpy.reshape", "numpy.reshape"):
            shape = shape[1:]
        text = ast.unparse(call)
        if shape and isinstance(shape[0], ast.BinOp) and isinstance(shape[0].op, ast.Add):
            shape = [shape[0].left]
        if len(shape) == 1 and isinstance(shape[0], ast.Tuple | ast.List):
            shape = list(shape[0].elts)
        if len(shape) < 2 or KEY.search(ast.unparse(call.func.value)):
            continue
        rest = ast.unparse(shape[1]) == "-1" or "//" in text
        if rest and _counts_devices(program, shape[0], counts):
            report.add(
                "remainder",
                call,
                "a batch that the devices do not divide fails here, as the last one of an epoch "
                "may",
                "pad it and weight the padding 0, or let the loader drop the remainder "
                "(drop_remainder)",
                WARNING,
            )


def _counts_devices(program: ParsedFile, node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is the number of devices, and nothing else."""
    if isinstance(node, ast.Name):
        return node.id in names
    if not isinstance(node, ast.Call):
        return False
    if program.name(node.func) in _COUNTS:
        return True
    return program.name(node.func) == "len" and any(
        isinstance(each, ast.Call) and program.name(each.func) in _DEVICES for each in node.args
    )


def _divides(program: ParsedFile) -> bool:
    """Whether a file makes batches divisible, or checks that they are."""
    for node in program.nodes:
        if isinstance(node, ast.Mod) and not _formats(program.parents[node]):
            return True
        if isinstance(node, ast.keyword) and node.arg in _DROPS and not _is_false(node.value):
            return True
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in _DIVIDING or "even_batches" in names_in(node.func):
                return True
    return False


def _is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and not node.value


def _formats(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant)

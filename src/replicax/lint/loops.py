"""Rules on the training loop: fetches and compilations in every iteration, and batch splits."""

import ast
import re
from collections.abc import Iterator

from replicax.lint.parsed import (
    BATCH,
    COMPILES,
    KEY_NAMES,
    SHARD_MAP,
    WARNING,
    Function,
    LoopNode,
    ParsedFile,
    given,
    names_in,
    targets,
)

_FETCHES = {
    *("float", "int", "print", "numpy.asarray", "numpy.array", "numpy.mean", "jax.device_get"),
    "wandb.log",
}
_FETCHING_METHODS = {"item", "tolist", "set_postfix", "set_description", "add_scalar"}
_STEP = re.compile(r"(^|_)step(_fn)?$")
"""Usual names of a compiled step, for files that do not show its compilation."""
_EPOCH = re.compile(r"(^|_)(epochs?|seeds?|folds?|trials?|rounds?)($|_)")
_FEW = 5
"""Loops of at most this many iterations may fetch in each of them."""
_COUNTS = {"jax.device_count", "jax.local_device_count"}
_DEVICES = {"jax.devices", "jax.local_devices"}
_DIVIDING = {"pad", "pad_shard_unpad", "divmod", "gcd"}


def check_loops(program: ParsedFile) -> None:
    """Report fetches and compilations in every iteration of the loops of a file."""
    compiled = {each.function for each in program.mapped}
    steps = {name for node in program.nodes for name in _compiled_names(program, node)}
    for node in program.nodes:
        if isinstance(node, ast.FunctionDef) and _compiled_names(program, node):
            compiled.add(node)
    steps |= {getattr(each, "name", "") for each in compiled}
    for loop in program.nodes:
        if isinstance(loop, LoopNode) and compiled.isdisjoint(program.around(loop)):
            _check_fetches(program, loop, steps)
            _check_compiled(program, loop)


def _compiled_names(program: ParsedFile, node: ast.AST) -> list[str]:
    """Return the names that a statement assigns to compiled functions."""
    if isinstance(node, ast.FunctionDef):
        made = any(program.called(each) in COMPILES for each in node.decorator_list)
        return [node.name] if made else []
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        return targets(node) if program.called(node.value) in COMPILES else []
    return []


def _own(loop: LoopNode) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes of a loop's body, and whether they are reached only conditionally.

    Nested loops and functions are excluded.
    """

    def below(node: ast.AST, guarded: bool) -> Iterator[tuple[ast.AST, bool]]:
        yield node, guarded
        if isinstance(node, Function | LoopNode | ast.ClassDef):
            return
        inner = guarded or isinstance(node, ast.If | ast.IfExp | ast.Try | ast.ExceptHandler)
        for child in ast.iter_child_nodes(node):
            yield from below(child, inner)

    guarded = False
    for statement in loop.body:
        yield from below(statement, guarded)
        leaves = any(isinstance(each, ast.Continue | ast.Break) for each in ast.walk(statement))
        if isinstance(statement, ast.If) and leaves and _counts(statement.test):
            guarded = True  # `if step % 100: continue`


def _counts(test: ast.expr) -> bool:
    return any(
        isinstance(each, ast.Mod) or (isinstance(each, ast.Name) and "step" in each.id)
        for each in ast.walk(test)
    )


def _check_fetches(program: ParsedFile, loop: LoopNode, steps: set[str]) -> None:
    if _is_quiet(program, loop):
        return
    nodes = list(_own(loop))
    waiting: set[str] = set()
    for node, _ in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func).rpartition(".")[2]
            waiting.update(targets(node) if name in steps or _STEP.search(name) else [])
    for node, guarded in nodes:
        if guarded or not isinstance(node, ast.Call) or not _fetched(program, node) & waiting:
            continue
        outer = program.parents[node]
        if isinstance(outer, ast.Call) and getattr(outer.func, "attr", "") in ("step", "send"):
            continue  # an environment needs it before the next step
        program.report(
            "fetched-every-step",
            node,
            "the host waits here for the devices in every step, and the devices then wait for the "
            "host to start the next one",
            "fetch every n steps (if step % n == 0:), or keep the arrays and fetch them after "
            "the loop",
            WARNING,
        )


def _fetched(program: ParsedFile, call: ast.Call) -> set[str]:
    """Return the names of the arrays that a call makes the host wait for."""
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if program.name(call.func) in _FETCHES:
        return _arrays(*given(call))
    return _arrays(*(given(call) or [call.func])) if method in _FETCHING_METHODS else set()


def _arrays(*nodes: ast.AST) -> set[str]:
    """Return the names in some nodes whose values are used, not only their shapes."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            names.add(node.id)
        if getattr(node, "attr", "") not in ("shape", "dtype", "ndim", "size"):
            names |= _arrays(*ast.iter_child_nodes(node))
    return names


def _is_quiet(program: ParsedFile, loop: LoopNode) -> bool:
    """Whether a loop may fetch in every iteration: over few items, epochs or configurations."""
    if isinstance(loop, ast.While):
        return False
    over, names = loop.iter, targets(loop)
    if isinstance(over, ast.Call) and program.name(over.func) == "range" and len(over.args) == 1:
        last = ast.unparse(over.args[0])
        if last.isdecimal() and int(last) <= _FEW:
            return True
        names.append(last)
    listed = isinstance(over, ast.Tuple | ast.List | ast.Set)
    return listed or any(_EPOCH.search(name) for name in names)


def _check_compiled(program: ParsedFile, loop: LoopNode) -> None:
    if isinstance(loop, ast.For) and isinstance(loop.iter, ast.Tuple | ast.List):
        return
    turns = set(targets(loop))
    batches = any(BATCH.match(name) for name in turns) or isinstance(loop, ast.While)
    nodes = [node for node, _ in _own(loop)]
    local = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        kind = program.name(node.func) if isinstance(node, ast.Call) and node.args else ""
        if not isinstance(node, ast.Call) or kind not in COMPILES:
            continue
        made = node.args[0]
        anew = isinstance(made, ast.Lambda | ast.Call) or names_in(made) & local
        if not (anew or kind in SHARD_MAP) or (names_in(node) & turns and not batches):
            continue
        what = kind.rpartition(".")[2].removeprefix("filter_")
        program.report(
            "compiled-in-loop",
            node,
            f"{what} of a new function in every iteration of the loop: it is traced and compiled "
            "each time",
            f"create it once before the loop: step = jax.{what}(...)",
            WARNING,
        )


def check_reshapes(program: ParsedFile) -> None:
    """Report `reshape(devices, -1, ...)` in a file that does not make batches divisible."""
    if not program.mapped or any(divides(program, node) for node in program.nodes):
        return
    counts = {
        name
        for node in program.nodes
        if isinstance(node, ast.Assign) and _counts_devices(program, node.value, set())
        for name in targets(node)
    }
    for call in program.calls():
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "reshape":
            continue
        shape = list(call.args)
        if program.name(call.func) in ("jax.numpy.reshape", "numpy.reshape"):
            shape = shape[1:]
        if shape and isinstance(shape[0], ast.BinOp) and isinstance(shape[0].op, ast.Add):
            shape = [shape[0].left]
        if len(shape) == 1 and isinstance(shape[0], ast.Tuple | ast.List):
            shape = list(shape[0].elts)
        if len(shape) < 2 or KEY_NAMES.search(ast.unparse(call.func.value)):
            continue
        rest = ast.unparse(shape[1]) == "-1" or "//" in ast.unparse(call)
        if rest and _counts_devices(program, shape[0], counts):
            program.report(
                "remainder",
                call,
                "a batch whose size is not divisible by the device count fails here, often the "
                "last one of an epoch",
                "pad it and give padded rows weight 0, or let the loader drop the remainder "
                "(drop_remainder)",
                WARNING,
            )


def _counts_devices(program: ParsedFile, node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is exactly the number of devices."""
    if isinstance(node, ast.Name):
        return node.id in names
    if not isinstance(node, ast.Call):
        return False
    name, listed = program.name(node.func), [program.called(each) for each in node.args]
    return name in _COUNTS or (name == "len" and not _DEVICES.isdisjoint(listed))


def divides(program: ParsedFile, node: ast.AST) -> bool:
    """Whether a node makes batches divisible or checks that they are."""
    if isinstance(node, ast.Mod):
        outer = program.parents[node]
        formats = isinstance(outer, ast.BinOp) and isinstance(outer.left, ast.Constant)
        return not formats
    if isinstance(node, ast.keyword) and node.arg in ("drop_remainder", "drop_last"):
        return not (isinstance(node.value, ast.Constant) and not node.value.value)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func).rpartition(".")[2]
        return called in _DIVIDING or "even_batches" in names_in(node.func)
    return False

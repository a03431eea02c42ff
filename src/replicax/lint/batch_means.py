"""Rule on the mean of values of batches that are cut from an array, of which the last is short."""

import ast
from collections.abc import Iterator

from replicax.lint.loops import divides
from replicax.lint.parsed import WARNING, Function, ParsedFile, keywords, names_in, targets

_MEANS = {
    *("numpy.mean", "numpy.average", "jax.numpy.mean", "jax.numpy.average"),
    *("statistics.mean", "statistics.fmean"),
}
_ARRAYS = {
    *("numpy.array", "numpy.asarray", "numpy.stack"),
    *("jax.numpy.array", "jax.numpy.asarray", "jax.numpy.stack"),
}
_Loop = ast.For | ast.comprehension


def check_batch_means(program: ParsedFile) -> None:
    """Report means of lists with a value for each batch, of a size that nothing makes divide."""
    for node in program.nodes:
        given = _averaged(program, node)
        if given is None:
            continue
        if isinstance(given, ast.Name):
            nodes = list(ast.walk(_scope(program, node)))
            sizes = {size for each in nodes for size in _sizes_of(program, each, given.id)}
        else:
            sizes = set(_sizes_of_list(program, given))
        for size in sorted(sizes):
            if any(_divides(program, each, size) for each in program.nodes):
                continue
            program.report(
                "mean-of-batches",
                node,
                f"if {size} does not divide the rows, the last batch is shorter, and counts as "
                "much as the others in this mean",
                "weight each value by its rows: np.average(values, weights=rows)",
                WARNING,
            )


def _divides(program: ParsedFile, node: ast.AST, size: str) -> bool:
    """Whether a node pads or checks batches; of remainders, only those of their size."""
    if isinstance(node, ast.Mod):
        outer = program.parents[node]
        return isinstance(outer, ast.BinOp) and ast.unparse(outer.right) == size
    return divides(program, node)


def _averaged(program: ParsedFile, node: ast.AST) -> ast.AST | None:
    """Return the list, or its name, of which a node is the mean without weights."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        total, count = node.left, node.right
        if not (isinstance(total, ast.Call) and isinstance(count, ast.Call)):
            return None
        named = program.name(total.func) == "sum" and program.name(count.func) == "len"
        alike = [ast.unparse(each) for each in total.args] == [ast.unparse(e) for e in count.args]
        return total.args[0] if named and alike and total.args else None
    if not isinstance(node, ast.Call) or program.name(node.func) not in _MEANS:
        return None
    if len(node.args) != 1 or keywords(node) & {"weights", "where", "axis", None}:
        return None
    given: ast.AST = node.args[0]
    if isinstance(given, ast.Call) and program.name(given.func) in _ARRAYS and given.args:
        given = given.args[0]
    return given if isinstance(given, ast.Name | ast.ListComp | ast.GeneratorExp) else None


def _scope(program: ParsedFile, node: ast.AST) -> ast.AST:
    """Return the function around a node, or the file."""
    return next((each for each in program.around(node) if isinstance(each, Function)), program.tree)


def _sizes_of(program: ParsedFile, node: ast.AST, name: str) -> Iterator[str]:
    """Yield the batch size of a loop that appends a batch's values to a list of that name."""
    if isinstance(node, ast.Assign) and targets(node) == [name]:
        yield from _sizes_of_list(program, node.value)
    if not isinstance(node, ast.For) or (size := _size(program, node, node.body)) is None:
        return
    of_batch = set(targets(node))
    for part in (inner for statement in node.body for inner in ast.walk(statement)):
        if isinstance(part, ast.Assign) and names_in(part.value) & of_batch:
            of_batch |= set(targets(part))
        if isinstance(part, ast.Call) and ast.unparse(part.func) == f"{name}.append":
            appended: list[ast.expr] = part.args
        elif isinstance(part, ast.AugAssign) and targets(part) == [name]:
            appended = [part.value]
        else:
            continue
        if names_in(*appended) & of_batch:
            yield size


def _sizes_of_list(program: ParsedFile, node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        size = _size(program, node.generators[0], [node.elt])
        if size is not None:
            yield size


def _size(program: ParsedFile, loop: _Loop, body: list[ast.stmt] | list[ast.expr]) -> str | None:
    """Return the size of the batches `[start : start + size]` of a loop over their starts."""
    over, start = loop.iter, loop.target
    if not (isinstance(over, ast.Call) and program.name(over.func) == "range"):
        return None
    if len(over.args) != 3 or not isinstance(start, ast.Name):
        return None
    size = ast.unparse(over.args[2])
    if _is_multiple(over.args[1], over.args[2]):
        return None
    wanted = (f"{start.id}:{start.id} + {size}", f"{start.id}:{size} + {start.id}")
    cuts = any(
        isinstance(each, ast.Slice) and ast.unparse(each) in wanted
        for inner in body
        for each in ast.walk(inner)
    )
    return size if cuts else None


def _is_multiple(rows: ast.expr, size: ast.expr) -> bool:
    """Whether a number of rows is divisible as it is written: `64`, `n // 16 * 16`, `len(x) - k`.

    Other arithmetic is assumed to make it so.
    """
    if isinstance(rows, ast.Constant) and isinstance(size, ast.Constant):
        return isinstance(rows.value, int) and rows.value % (size.value or 1) == 0  # type: ignore[operator]
    return isinstance(rows, ast.BinOp)

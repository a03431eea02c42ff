"""One file as the rules see it: its imports, its functions, and which run on each replica."""

import ast
import builtins
import dataclasses
import re
from collections.abc import Iterator, Mapping

BATCH = re.compile(r"^(\w+_)?(batch|images?|labels?|inputs?|targets?|tokens|xs?|ys?|data)$")
"""Usual names of a batch and its parts."""
KEY = re.compile(r"(^|_)(rngs?|keys?|prng|seed)($|_)")
"""Usual names of a PRNG key."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPS = (ast.For, ast.AsyncFor, ast.While)

_CUSTOMARY = {
    "jax": "jax",
    "jnp": "jax.numpy",
    "np": "numpy",
    "lax": "jax.lax",
    "optax": "optax",
    "nnx": "flax.nnx",
}
"""Names that a snippet uses without importing them."""
PMAP = {"jax.pmap", "flax.nnx.pmap", "equinox.filter_pmap"}
SHARD_MAP = {"jax.shard_map", "jax.experimental.shard_map.shard_map", "flax.nnx.shard_map"}
JIT = {"jax.jit", "flax.nnx.jit", "equinox.filter_jit", "jax.experimental.pjit.pjit"}
COMPILES = JIT | PMAP | SHARD_MAP
GRADS = {
    *("jax.grad", "flax.nnx.grad", "equinox.filter_grad", "haiku.grad"),
    *("jax.value_and_grad", "flax.nnx.value_and_grad", "equinox.filter_value_and_grad"),
    "haiku.value_and_grad",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Mapped:
    """A function that runs on each replica."""

    function: Function
    call: ast.AST
    """Where it is mapped."""
    options: Mapping[str, ast.expr]
    kind: str
    """The canonical name of what maps it."""

    @property
    def sums_by_itself(self) -> bool:
        """Whether differentiation adds up over replicas: shard_map, unless it is unchecked."""
        off = [self.options.get(name) for name in ("check_vma", "check_rep")]
        return self.kind in SHARD_MAP and not any(
            isinstance(each, ast.Constant) and each.value is False for each in off
        )


class ParsedFile:
    """A parsed file."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.nodes = list(ast.walk(tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.imported = dict(_imported(self.nodes))
        self._bound: dict[Function, set[str]] = {}
        self.functions: dict[str, list[Function]] = {}
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        self.functions.setdefault(target.id, []).append(node.value)
        self.mapped = [each for node in self.nodes for each in self._mapped(node)]

    def name(self, node: ast.AST) -> str:
        """Return the full name that `node` writes, `jax.lax.pmean` say; empty if it is none.

        What is no import and no builtin begins with `local`.
        """
        if isinstance(node, ast.Name):
            if node.id in self.imported and self._is_variable(node):
                return f"local.{node.id}"
            own = node.id if hasattr(builtins, node.id) else f"local.{node.id}"
            return self.imported.get(node.id, _CUSTOMARY.get(node.id, own))
        if isinstance(node, ast.Attribute):
            base = self.name(node.value)
            return f"{base}.{node.attr}" if base else ""
        return ""

    def called(self, node: ast.AST) -> str:
        """Return the full name of what a call calls, of `partial(f, ...)` that of f; or a name."""
        if not isinstance(node, ast.Call):
            return self.name(node)
        if self.name(node.func) == "functools.partial" and node.args:
            return self.name(node.args[0])
        return self.name(node.func)

    def last_called(self, node: ast.AST) -> str:
        """Return the last part of that name, `pmean` say."""
        return self.called(node).rpartition(".")[2]

    def calls(self, *functions: ast.AST) -> Iterator[ast.Call]:
        """Yield all calls in some nodes."""
        for function in functions:
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield node

    def reached(self, function: Function) -> list[Function]:
        """Return a function and those of the file that it names, and that these name."""
        found: dict[Function, None] = {}
        left = [function]
        while left:
            here = left.pop()
            if here in found:
                continue
            found[here] = None
            for node in ast.walk(here):
                name = getattr(node, "attr", None) or getattr(node, "id", None)
                left += self.functions.get(name, []) if name else []
        return list(found)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what a node is in, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def _is_variable(self, name: ast.Name) -> bool:
        """Whether a function around it has an argument or a variable of that name."""
        for outer in self.around(name):
            if isinstance(outer, FUNCTIONS):
                if outer not in self._bound:
                    self._bound[outer] = set(_bound(outer))
                if name.id in self._bound[outer]:
                    return True
        return False

    def _mapped(self, node: ast.AST) -> Iterator[Mapped]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.decorator_list:
                name = self.called(each)
                if name in PMAP | SHARD_MAP:
                    yield Mapped(node, each, _options(each), name)
        name = self.name(node.func) if isinstance(node, ast.Call) and node.args else ""
        if isinstance(node, ast.Call) and name in PMAP | SHARD_MAP:
            first = node.args[0]
            while isinstance(first, ast.Call) and first.args:  # partial(f), jax.vmap(f)
                first = first.args[0]
            if isinstance(first, ast.Lambda):
                yield Mapped(first, node, _options(node), name)
            last = getattr(first, "attr", None) or getattr(first, "id", None)
            for function in self.functions.get(last, []) if last else []:
                if not isinstance(function, ast.Lambda):
                    yield Mapped(function, node, _options(node), name)


def _options(call: ast.AST) -> dict[str, ast.expr]:
    keywords = call.keywords if isinstance(call, ast.Call) else []
    found = {each.arg: each.value for each in keywords if each.arg}
    if isinstance(call, ast.Call) and len(call.args) > 1 and "axis_name" not in found:
        found["axis_name"] = call.args[1]
    return found


def _imported(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield names and what they stand for, wherever in the file they are imported."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                yield local, alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _bound(function: Function) -> Iterator[str]:
    """Yield the arguments and variables of a function; what it imports is no variable."""
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def given(call: ast.Call) -> list[ast.expr]:
    """Return all arguments of a call."""
    return [*call.args, *(each.value for each in call.keywords)]


def keywords(call: ast.Call) -> set[str | None]:
    """Return the names of a call's arguments; None among them for `**options`."""
    return {each.arg for each in call.keywords}


def names_in(*nodes: ast.AST) -> set[str]:
    """Return the names that are read or written in some nodes."""
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def targets(node: ast.AST) -> list[str]:
    """Return the names that a statement assigns, from left to right."""
    of: list[ast.AST] = []
    if isinstance(node, ast.Assign):
        of = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
        of = [node.target]
    return [
        each.id
        for target in of
        for each in ast.walk(target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]

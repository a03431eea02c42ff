"""A parsed file for the rules: imports, functions, which of them run per replica, and findings."""

import ast
import builtins
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal

from replicax.errors import ConfigError

Severity = Literal["error", "warning", "note"]
ERROR: Final[Literal["error"]] = "error"
"""Wrong numbers, or a call that fails."""
WARNING: Final[Literal["warning"]] = "warning"
"""Slow, wasteful, or wrong for some data."""
NOTE_LEVEL: Final[Literal["note"]] = "note"
"""Works today, but there is a better way to write it."""
_IGNORE = re.compile(r"#.*\breplicax:\s*ignore(?:\[([\w\s,-]*)\])?")

BATCH = re.compile(r"^(\w+_)?(batch|images?|labels?|inputs?|targets?|tokens|xs?|ys?|data)$")
"""Usual names of a batch and its parts."""
KEY_NAMES = re.compile(r"(^|_)(rngs?|keys?|prng|seed)($|_)")
"""Usual names of a PRNG key."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
LoopNode = ast.For | ast.AsyncFor | ast.While

_CUSTOMARY = {
    "jax": "jax",
    "jnp": "jax.numpy",
    "np": "numpy",
    "lax": "jax.lax",
    "optax": "optax",
    "nnx": "flax.nnx",
}
"""Conventional names that a snippet may use without importing them."""
PMAP = {"jax.pmap", "flax.nnx.pmap", "equinox.filter_pmap"}
SHARD_MAP = {"jax.shard_map", "jax.experimental.shard_map.shard_map", "flax.nnx.shard_map"}
JIT = {"jax.jit", "flax.nnx.jit", "equinox.filter_jit", "jax.experimental.pjit.pjit"}
COMPILES = JIT | PMAP | SHARD_MAP
GRADS = {
    *("jax.grad", "flax.nnx.grad", "equinox.filter_grad", "haiku.grad"),
    *("jax.value_and_grad", "flax.nnx.value_and_grad", "equinox.filter_value_and_grad"),
    "haiku.value_and_grad",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """An error in the code, with its line, reason and fix."""

    line: int
    """From 1."""
    column: int
    """From 1, as editors count."""
    rule: str
    """The rule's name; `# replicax: ignore[NAME]` on the line silences it."""
    severity: Severity
    reason: str
    fix: str
    code: str
    """The source line."""


@dataclasses.dataclass(frozen=True, eq=False)
class MappedCall:
    """A function that runs on each replica."""

    function: Function
    call: ast.AST
    """The mapping call or decorator."""
    options: Mapping[str, ast.expr]
    kind: str
    """The full name of the mapping function."""

    @property
    def sums_by_itself(self) -> bool:
        """Whether differentiation sums over replicas: true for shard_map unless unchecked."""
        off = [self.options.get(name) for name in ("check_vma", "check_rep")]
        return self.kind in SHARD_MAP and not any(
            isinstance(each, ast.Constant) and each.value is False for each in off
        )


class ParsedFile:
    """A parsed file and its findings, at most one per rule and line."""

    def __init__(self, text: str, path: Path) -> None:
        self.lines = text.splitlines()
        try:
            self.tree = ast.parse(text, filename=str(path))
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            where = f"line {line}: " if line else ""
            said = getattr(error, "msg", None) or str(error)
            raise ConfigError(
                f"{path} is not Python: {where}{said}; pass a .py file that runs"
            ) from error
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.imported = dict(_imported(self.nodes))
        self._bound: dict[Function, set[str]] = {}
        self._found: dict[tuple[str, int], Finding] = {}
        self.functions: dict[str, list[Function]] = {}
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
                for name in targets(node):
                    self.functions.setdefault(name, []).append(node.value)
        self.mapped = [each for node in self.nodes for each in self._mapped(node)]

    def report(
        self, rule: str, node: ast.AST, reason: str, fix: str, severity: Severity = ERROR
    ) -> None:
        """Add a finding, unless the line has `# replicax: ignore` or the finding exists."""
        line = line_of(node)
        if not self.ignores(rule, line):
            code = self._line(line)
            start = code.encode()[: getattr(node, "col_offset", 0)]  # ast counts bytes
            column = len(start.decode(errors="ignore")) + 1
            finding = Finding(line, column, rule, severity, reason, fix, code)
            self._found.setdefault((rule, line), finding)

    def findings(self) -> list[Finding]:
        """Return all findings in file order."""
        return sorted(self._found.values(), key=lambda one: (one.line, one.column, one.rule))

    def ignores(self, rule: str, line: int) -> bool:
        """Whether a line, or a comment alone above it, silences a rule there."""
        code, above = self._line(line), self._line(line - 1)
        for text in (code, above if above.strip().startswith("#") else ""):
            match = _IGNORE.search(text)
            if match and (not match[1] or rule in re.split(r"[\s,]+", match[1])):
                return True
        return False

    def _line(self, number: int) -> str:
        return self.lines[number - 1] if 1 <= number <= len(self.lines) else ""

    def name(self, node: ast.AST) -> str:
        """Return the full name that `node` refers to, such as `jax.lax.pmean`; empty if none.

        Names that are neither imported nor builtin begin with `local`.
        """
        if isinstance(node, ast.Attribute):
            base = self.name(node.value)
            return f"{base}.{node.attr}" if base else ""
        if not isinstance(node, ast.Name):
            return ""
        if node.id in self.imported and self._is_variable(node):
            return f"local.{node.id}"
        otherwise = node.id if hasattr(builtins, node.id) else f"local.{node.id}"
        return self.imported.get(node.id, _CUSTOMARY.get(node.id, otherwise))

    def called(self, node: ast.AST) -> str:
        """Return the full name of a called function (of f for `partial(f, ...)`), or of a name."""
        if not isinstance(node, ast.Call):
            return self.name(node)
        if self.name(node.func) == "functools.partial" and node.args:
            return self.name(node.args[0])
        return self.name(node.func)

    def last_called(self, node: ast.AST) -> str:
        """Return the last part of the full name of a called function, such as `pmean`."""
        return self.called(node).rpartition(".")[2]

    def calls(self, *functions: ast.AST) -> Iterator[ast.Call]:
        """Yield all calls in the given functions, by default in the file."""
        for function in functions or [self.tree]:
            yield from (node for node in ast.walk(function) if isinstance(node, ast.Call))

    def reached(self, function: Function) -> list[Function]:
        """Return a function and the functions of the file that it refers to, transitively."""
        reached: dict[Function, None] = {}
        waiting = [function]
        while waiting:
            here = waiting.pop()
            if here in reached:
                continue
            reached[here] = None
            for node in ast.walk(here):
                waiting += self._named(node)
        return list(reached)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the ancestors of a node, innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def _named(self, node: ast.AST) -> list[Function]:
        """Return the functions of the file that a name or attribute may refer to."""
        return self.functions.get(str(getattr(node, "attr", getattr(node, "id", ""))), [])

    def _is_variable(self, name: ast.Name) -> bool:
        """Whether an enclosing function has an argument or variable of that name."""
        for outer in self.around(name):
            if isinstance(outer, Function):
                if outer not in self._bound:
                    self._bound[outer] = bound(outer)
                if name.id in self._bound[outer]:
                    return True
        return False

    def _mapped(self, node: ast.AST) -> Iterator[MappedCall]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for decorator in node.decorator_list:
                name = self.called(decorator)
                if name in PMAP | SHARD_MAP:
                    yield MappedCall(node, decorator, _options(decorator), name)
        if not (isinstance(node, ast.Call) and node.args):
            return
        name, first = self.name(node.func), node.args[0]
        if name in PMAP | SHARD_MAP:
            while isinstance(first, ast.Call) and first.args:  # partial(f), jax.vmap(f)
                first = first.args[0]
            functions = [each for each in self._named(first) if not isinstance(each, ast.Lambda)]
            for function in [first] if isinstance(first, ast.Lambda) else functions:
                yield MappedCall(function, node, _options(node), name)


def _options(call: ast.AST) -> dict[str, ast.expr]:
    if not isinstance(call, ast.Call):
        return {}
    named = {each.arg: each.value for each in call.keywords if each.arg}
    return {"axis_name": call.args[1], **named} if len(call.args) > 1 else named


def _imported(nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield imported names and what they refer to, from anywhere in the file."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.partition(".")[0]
                yield local, alias.name if alias.asname else local
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def bound(function: Function) -> set[str]:
    """Return the arguments and variables of a function, without its imports."""
    nodes = list(ast.walk(function))
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return arguments | {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def free_names(function: Function) -> set[str]:
    """Return the names that a function reads but does not assign."""
    body = [function.body] if isinstance(function, ast.Lambda) else function.body
    inner = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)}
    return names_in(*body) - bound(function) - inner


def given(call: ast.Call) -> list[ast.expr]:
    """Return all arguments of a call."""
    return [*call.args, *(each.value for each in call.keywords)]


def keywords(call: ast.Call) -> set[str | None]:
    """Return the names of a call's keyword arguments, including None for `**options`."""
    return {each.arg for each in call.keywords}


def names_in(*nodes: ast.AST) -> set[str]:
    """Return the names that are read or written in the given nodes."""
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def targets(node: ast.AST) -> list[str]:
    """Return the names that a statement assigns, from left to right."""
    of: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        of = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.NamedExpr):
        of = [node.target]
    return [
        each.id
        for target in of
        for each in ast.walk(target)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    ]


def line_of(node: ast.AST) -> int:
    """Return the line at which a node begins."""
    return int(getattr(node, "lineno", 1))

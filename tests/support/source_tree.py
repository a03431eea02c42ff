"""The source of Replicax as trees, and which module imports which."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SOURCE.glob("replicax/**/*.py"))}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file."""
    return list(ast.walk(parsed(path)))


def part(module: str, depth: int) -> str:
    """The word at `depth` of a dotted name, or "" for the package itself."""
    return (*module.split("."), "", "")[depth]


@functools.cache
def imports(module: str, *, when_loaded: bool = False) -> list[str]:
    """The modules of Replicax that `module` imports: anywhere, or only while it is being loaded."""
    found = list[str]()
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in statements(parsed(path), into_functions=not when_loaded):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            named = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else base for name in named]
        else:
            continue
        found += [name for name in names if part(name, 0) == "replicax" and name != module]
    return found


def statements(node: ast.AST, *, into_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        )
        if into_functions or not deferred:
            yield child
            yield from statements(child, into_functions=into_functions)

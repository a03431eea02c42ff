"""The house: who may import whom, how long a file may be, and what `import replicax` loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"

# From the bottom up. "" is `replicax/__init__.py`, the public names.
ROWS = (
    "errors",
    "wording",
    "python_file",
    "cluster",
    "analysis",
    "core",
    "train",
    "launch",
    "doctor",
    "plan",
    "verify",
    "bench",
    "",
    "recipes",
    "flags",
    "commands",
    "cli",
    "__main__",
)
MOST_LINES = 500
# What a user may have and `import replicax` must not need; each is imported where it is used.
OPTIONAL = (
    "equinox",
    "flax",
    "grain",
    "matplotlib",
    "orbax",
    "pooch",
    "ray",
    "requests",
    "rich",
    "safetensors",
    "scipy",
    "sklearn",
    "tensorboardX",
    "tokenizers",
    "torch",
    "transformers",
    "tyro",
)


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in sorted(SOURCE.glob("replicax/**/*.py"))}


def part(module: str, depth: int) -> str:
    """The word at `depth` of a dotted name, or "" for the package itself."""
    return (*module.split("."), "", "")[depth]


def imports(module: str, *, when_loaded: bool = False) -> Iterator[str]:
    """The modules of Replicax that `module` imports: anywhere, or only while it is being loaded."""
    path = FILES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in statements(ast.parse(path.read_text()), into_functions=not when_loaded):
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
        yield from (name for name in names if part(name, 0) == "replicax" and name != module)


def statements(node: ast.AST, *, into_functions: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        )
        if into_functions or not deferred:
            yield child
            yield from statements(child, into_functions=into_functions)


@pytest.mark.parametrize("module", FILES)
def test_every_module_has_its_place(module: str) -> None:
    assert part(module, 1) in ROWS


@pytest.mark.parametrize("module", FILES)
def test_imports_come_from_rows_above(module: str) -> None:
    allowed = ROWS[: ROWS.index(part(module, 1)) + 1]
    for imported in imports(module):
        assert imported in FILES, f"{module} imports {imported}, which does not exist"
        assert part(imported, 1) in allowed, f"{module} may not import {imported}"


def test_no_module_is_loaded_in_a_cycle() -> None:
    graph = {module: set(imports(module, when_loaded=True)) for module in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("module", FILES)
def test_files_are_short(module: str) -> None:
    assert len(FILES[module].read_text().splitlines()) <= MOST_LINES


def test_importing_replicax_loads_jax_numpy_optax_and_nothing_more() -> None:
    script = (
        "import sys, jax, numpy, optax\n"
        "before = set(sys.modules)\n"
        "import replicax\n"
        f"print(*sorted(set({OPTIONAL!r}) & (set(sys.modules) - before)))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.split() == []

"""Who may import whom, and what `import replicax` loads."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from support.source_tree import FILES, imports, nodes, parsed, part

from replicax.core.modes.mode_table import MODES
from replicax.core.placement.layout import LAYOUTS

VERBS = {"verify", "plan", "bench", "doctor", "launch"}
BESIDE = {
    "core",
    "known_wrong",
    "train",
    "net",
    "cluster",
    "islands",
    "analysis",
    "recipes",
    "text",
}
ROOMS = {
    "errors": {"text"},
    "text": {"errors"},
    "known_wrong": {"errors"},
    "core": {"errors", "text", "known_wrong"},
    "lint": {"errors", "text"},
    "losses": {"core"},
    "optimizers": {"errors", "text", "core"},
    "remat": set(),
    "hooks": {"train"},
    "types": {"core", "cluster", "train", "bench", "plan", "verify"},
    "analysis": {"errors"},
    "net": {"errors"},
    "cluster": {"errors", "text", "core", "net"},
    "islands": {"errors", "text", "core", "net", "cluster"},
    "train": {"errors", "text", "core", "known_wrong", "cluster", "islands", "analysis"},
    "weights": {"errors", "text", "core", "train"},
    "recipes": {"errors", "text", "core", "losses", "remat", "weights", ""},
    **{verb: {"errors", "", *BESIDE} for verb in VERBS},
    "load_run": {"errors", *BESIDE},
    "verified": {"errors", "verify", "plan", *BESIDE},
    "": {
        "errors",
        "load_run",
        "verified",
        "hooks",
        "losses",
        "optimizers",
        "remat",
        "types",
        "weights",
        *VERBS,
        *BESIDE,
    },
    "cli": {"errors", "", "lint", "weights", *VERBS, *BESIDE},
    "__main__": {"cli"},
}
"""Who may import whom. "" is `replicax/__init__.py`, the public names."""

INNER = {
    "core": (
        *("ground", "jaxprs", "data", "placement", "models", "step", "custom", "pipeline"),
        *("first_step", "modes", "between", "config", "batch_placement", "program"),
        *("call_checks", "evaluation", "several_steps", "state_summary", "data_parallel"),
    ),
    "train": ("files", "checkpoints", "folder", "guarded", "dispatched", "hooks", "run"),
}
"""Rooms and files in a room; each imports those before it."""

BROKEN: set[tuple[str, str]] = set()
"""`(module, imported)` that break a rule of `ROOMS` still. It can only shrink."""

NAMED = {
    "replicax.analysis.flops",  # JAX's primitives, some of which have a mode's name
    "replicax.plan.operations",
}
"""Modules that compare such a name and mean something else."""

# Optional packages, which `import replicax` must not need; each is imported where it is used.
OPTIONAL = (
    "comet_ml",
    "equinox",
    "flax",
    "grain",
    "matplotlib",
    "mlflow",
    "orbax",
    "pooch",
    "ray",
    "requests",
    "rich",
    "safetensors",
    "scipy",
    "tensorboard",
    "tokenizers",
    "torch",
    "trackio",
    "transformers",
    "tyro",
    "wandb",
)


def public_names(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines at its top level."""
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.Assign():
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
            case _:
                continue
        yield from (name for name in names if name[0] != "_")


def broken() -> set[tuple[str, str]]:
    """Return imports that no rule allows."""
    found = set()
    for module in FILES:
        own = part(module, 1)
        for imported in imports(module):
            assert imported in FILES, f"{module} imports {imported}, which does not exist"
            room = part(imported, 1)
            inner, other = part(module, 2), part(imported, 2)
            taken = own != "cluster" or room != "core" or other == "ground"
            if room != own and not (room in ROOMS[own] and taken):
                found.add((module, imported))
            order = INNER.get(own, ()) if own == room else ()
            if order and order.index(other) > order.index(inner):
                found.add((module, imported))
    return found


def circles() -> set[str]:
    """Return modules whose imports, also deferred and typing ones, lead back to themselves."""
    graph = {module: set(imports(module)) for module in FILES}

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        waiting = [module]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    return {module for module in FILES if module in reached(module)}


def comparing() -> set[str]:
    """Return modules that compare something with the name of a mode or a layout."""
    names, found = {*MODES, *LAYOUTS}, set()
    for module, path in FILES.items():
        for node in nodes(path):
            if isinstance(node, ast.Compare):
                constants = [each for each in ast.walk(node) if isinstance(each, ast.Constant)]
                if any(constant.value in names for constant in constants):
                    found.add(module)
    return found


def test_every_module_has_its_room() -> None:
    assert [module for module in FILES if part(module, 1) not in ROOMS] == []


def test_rooms_import_what_they_may() -> None:
    assert broken() == BROKEN


def test_no_imports_in_a_circle() -> None:
    assert circles() == set()


def test_no_module_is_loaded_in_a_circle() -> None:
    graph = {module: set(imports(module, when_loaded=True)) for module in FILES}
    TopologicalSorter(graph).prepare()


def test_no_two_modules_have_one_name() -> None:
    names = Counter(path.stem for path in FILES.values() if path.stem[:2] != "__")
    assert [name for name, count in names.items() if count > 1] == []


def test_a_public_name_has_one_meaning() -> None:
    """Classes, functions, aliases and constants; a command of the same name calls its verb."""
    homes: dict[str, list[str]] = {}
    for module, path in FILES.items():
        for name in public_names(parsed(path)):
            if module != f"replicax.cli.{name}":
                homes.setdefault(name, []).append(module)
    several = {name for name, modules in homes.items() if len(modules) > 1}
    assert several == {"Network", "Params", "logits"}  # the models of two recipes


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    begins = re.compile(r'^ *"""(Of|What|Whoever|Those|That)\b', re.M)
    paths = [*FILES.values(), *Path(__file__).parent.rglob("*.py")]
    assert [path for path in paths if begins.search(path.read_text())] == []


def test_modes_and_layouts_are_asked_and_not_compared() -> None:
    assert comparing() == NAMED


def test_versions_are_compared_in_one_room() -> None:
    """The range that is supported is compared by the doctor, with pyproject.toml."""
    compared = re.compile(r"(version\(\S*\)|__version__)( *[<>=]=? |\.startswith)")
    assert [
        module
        for module, path in FILES.items()
        if part(module, 1) != "known_wrong" and compared.search(path.read_text())
    ] == []


def test_core_and_train_have_no_global_that_changes() -> None:
    assert [
        module
        for module, path in FILES.items()
        if part(module, 1) in ("core", "train")
        and any(isinstance(node, ast.Global) for node in nodes(path))
    ] == []


@pytest.mark.promise("install.core-is-small")
def test_importing_replicax_loads_the_core_and_nothing_more() -> None:
    """Nothing at first; and what only a first step needs, not even with a `DataParallel`."""
    script = (
        "import sys, jax, optax\n"
        "before = set(sys.modules)\n"
        "import replicax\n"
        "print(*sorted(set(sys.modules) - before))\n"
        "replicax.DataParallel(lambda model, batch, key: batch, optax.sgd(1))\n"
        "loaded = set(sys.modules) - before\n"
        "own = {name for name in loaded if name.startswith('replicax.')}\n"
        "rooms = ('core', 'errors', 'known_wrong', 'text')\n"
        "later = ('jaxprs', 'pipeline', 'islands')\n"
        "core = {name for name in own if name.split('.')[1] in rooms and not "
        "set(name.split('.')) & set(later)}\n"
        f"print(*sorted(set({(*OPTIONAL, 'jax.extend')!r}) & loaded | own - core))\n"
        "print(len(loaded))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    at_once, others, count = done.stdout.splitlines()
    assert (at_once, others) == ("replicax", "")
    assert int(count) <= 90

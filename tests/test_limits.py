"""Limits of files and classes, and who may name what. The lists can only shrink."""

import ast
import re
from collections import Counter, defaultdict
from inspect import signature
from pathlib import Path

from support.entered import entered, files
from support.one_step import warm_step
from support.source_tree import FILES, imports, nodes, part

from replicax.core.data_parallel import DataParallel

MOST_LINES_OF_STEP = 1_900
"""Lines of `core/step`, which is the mathematics."""
MOST_FILES_OF_A_STEP = 16
"""Files that a `jit` step enters while it is traced, and once it is compiled."""
MOST_CODE_LINES = 300
"""In a file, without docstrings, imports and blank lines: who documents need not cut a file."""

ONE_SUBCLASS = {
    "Collectives": "SentOverAxes",
    "CollectivePrograms": "ExchangedPrograms",
    "Failures": "FailureOptions",
    "Form": "AsGiven",
    "Objective": "Staged",
    "PlainProgress": "NotebookProgress",
    "Store": "RemoteStore",
    "TreeSum": "_ExchangedSum",
    "Trial": "ProgramTrial",
    "Wire": "_Magnitudes",
}
"""Classes with one subclass, which are often one class that was cut."""

NAME_ISLANDS = {"config", "ground.train_state"}
"""Files of the core that name islands, `between` apart."""

SEAMS = {
    "RoundStep": "replicax.core.between",
    "IslandJob": "replicax.islands",
    "Wire": "replicax.core.step",
    "Linked": "replicax.cluster",
}
"""Implementations of a protocol, and their rooms, outside of which nobody asks for them."""

ASK_FOR_ONE = {
    ("IslandJob", "train.hooks.audit"),
    ("IslandJob", "train.run.members"),
    ("Wire", "bench.runner"),
    ("Wire", "core.modes.exact.exact_mode"),
    ("Wire", "core.modes.exact.micro_shard_function"),
    ("Wire", "core.modes.exact.ordered_reduction"),
    ("Wire", "core.modes.mapping"),
    ("Wire", "plan.planner"),
    ("Wire", "verify.traffic"),
}

SMALLEST = 60
SMALL = {
    "core.models.equinox",
    "doctor.known_numbers",
    "hooks",
    "islands.local_arrays",
    "islands.pace",
    "types",
}
"""Modules below `SMALLEST` lines with one importer, commands apart."""


def short(module: str) -> str:
    return module.removeprefix("replicax.")


def code_lines(path: Path) -> int:
    apart: set[int] = set()
    for node in nodes(path):
        match node:
            case ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant(value=str())):
                apart |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(bool(line.strip()) and number not in apart for number, line in lines)


def test_files_are_short() -> None:
    lines = {short(module): code_lines(path) for module, path in FILES.items()}
    assert {module: count for module, count in lines.items() if count > MOST_CODE_LINES} == {}


def test_a_class_is_not_cut_in_two() -> None:
    """Protocols and errors apart."""
    classes: dict[str, list[str]] = {}
    heirs = defaultdict(list)
    for path in FILES.values():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                classes[node.name] = bases
                for base in bases:
                    heirs[base].append(node.name)
    assert {
        name: heirs[name][0]
        for name, bases in classes.items()
        if len(heirs[name]) == 1 and "Protocol" not in bases and not name.endswith("Error")
    } == ONE_SUBCLASS


def test_the_arguments_of_data_parallel_are_listed_twice() -> None:
    """In the signature and in the record; a call or a class that names half of them is a list."""
    arguments, lists = {*signature(DataParallel.__init__).parameters}, []
    for module, path in FILES.items():
        for node in nodes(path):
            names = {
                getattr(child, "arg", getattr(getattr(child, "target", child), "id", None))
                for child in ast.iter_child_nodes(node)
            }
            if len(arguments & names) >= len(arguments) // 2:
                lists.append((short(module), type(node).__name__))
    assert lists == [("core.config", "ClassDef"), ("core.data_parallel", "arguments")]


def test_islands_are_named_in_few_files_of_the_core() -> None:
    assert {
        module.removeprefix("replicax.core.")
        for module, path in FILES.items()
        if module.startswith("replicax.core.")
        and part(module, 2) != "between"
        and re.search("island", path.read_text(), re.I)
    } == NAME_ISLANDS


def test_an_implementation_is_not_asked_for() -> None:
    asked = set()
    for module, path in FILES.items():
        for node in nodes(path):
            match node:
                case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                    names = {each.id for each in ast.walk(kinds) if isinstance(each, ast.Name)}
                    asked |= {
                        (name, short(module))
                        for name in names & {*SEAMS}
                        if not module.startswith(SEAMS[name])
                    }
    assert asked == ASK_FOR_ONE


def test_small_files_have_several_users() -> None:
    importers = defaultdict(set)
    for module in FILES:
        for imported in imports(module):
            importers[imported].add(module)
    assert {
        short(module)
        for module, path in FILES.items()
        if part(module, 1) not in ("cli", "__main__")
        and path.stem != "__init__"
        and len(importers[module]) == 1
        and len(path.read_text().splitlines()) < SMALLEST
    } == SMALL


def test_the_step_is_small() -> None:
    rooms = Counter[str]()
    for module, path in FILES.items():
        rooms[".".join(module.split(".")[:3])] += len(path.read_text().splitlines())
    assert rooms["replicax.core.step"] <= MOST_LINES_OF_STEP


def test_the_walk_of_a_step_is_short() -> None:
    walked = files(entered(warm_step()))
    assert "core/step/update.py" in walked
    assert len(walked) <= MOST_FILES_OF_A_STEP


def test_the_page_on_the_house_has_these_limits_and_counts_nothing_else() -> None:
    page = (Path(__file__).parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    limits = MOST_CODE_LINES, MOST_LINES_OF_STEP, MOST_FILES_OF_A_STEP, SMALLEST
    counted = re.findall(r"(?<![\w-])(\d[\d,]*) (?:lines|files|in all)", page)
    assert {int(count.replace(",", "")) for count in counted} == {*limits}

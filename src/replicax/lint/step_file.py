"""Write the file that `replicax verify --step` needs from a training script.

It contains the script's step with its dependencies, and a reference: the same function on one
replica that has the whole batch, where reductions are the identity. State and batch are taken from
the script if it creates them at the top level, and are left to be filled in otherwise.
"""

import ast
import builtins
import textwrap
from pathlib import Path

from replicax.errors import ConfigError
from replicax.lint.numeric_rules import REDUCES, REPLICATES
from replicax.lint.parsed import (
    BATCH,
    KEY_NAMES,
    PMAP,
    MappedCall,
    ParsedFile,
    free_names,
    names_in,
    targets,
)

_FILE = '''\
"""The step of {path} on several replicas and on one.

replicax verify --step {to}:step --reference {to}:reference
"""

{copied}


{function}


mapped = {mapped}
one = jax.vmap({name}{axis})


def step(state, {rows}):
    """Run the step as {path} does."""
    return paired(mapped({given}))


def reference(state, {rows}):
    """Run the step on one replica, which has the whole batch."""
    arguments = jax.tree.map(lambda each: jax.numpy.asarray(each)[None], ({given}))
    return paired(jax.tree.map(lambda each: each[0], one(*arguments)))


def paired(results):
    """Return the new state and the step's other results."""
    return {paired}
'''
_DIFFERENTIATE = {"grad", "value_and_grad", "filter_grad", "filter_value_and_grad"}
_WANTED = {
    "state": "the initial state of the step, for one device",
    "batch": "a global batch, arrays of [rows, ...] with at least one row per device",
    "key": "a random key, the same for all replicas: jax.random.key(0)",
}


def step_file(text: str, path: Path, to: Path) -> str:
    """Return the source of a file `to` for `verify --step`, from the script `text` at `path`."""
    program = ParsedFile(text, path)
    mapped = _step(program, path)
    function = mapped.function
    name = getattr(function, "name", "train_step")
    arguments = [each.arg for each in function.args.args]
    parts = _parts(arguments, path)
    made = {each: node for node in program.tree.body for each in _makes(node)}
    free = (free_names(function) | names_in(function.args, mapped.call)) - {name}
    missing = dict.fromkeys(free - made.keys(), f"defined inside a function of {path.name}")
    missing = {each: said for each, said in missing.items() if not hasattr(builtins, each)}
    renamed = []
    for part, names in parts.items():
        if set(names) <= made.keys() and not any(_stacks(program, made[each]) for each in names):
            free |= set(names)
            renamed += [f"{part} = {', '.join(names)}"] if names != [part] else []
        else:
            missing[part] = f"{_WANTED[part]} ({', '.join(names)})"
    lines = [f"{each} = ...  # {said}" for each, said in missing.items()]
    if lines:
        lines.append(f'raise NotImplementedError("fill in {", ".join(missing)}; remove this line")')
    source = ast.get_source_segment(text, function, padded=True) or ""
    count = len(parts["state"])
    rows = ", ".join(name for part, names in parts.items() for name in names if part != "state")
    return _FILE.format(
        path=path.name,
        to=to,
        name=name,
        copied="\n".join(
            [*_copies(program, text, made, free | {"jax"}), "\n", *lines, *renamed]
        ).rstrip(),
        function=f"{name} = {source.strip()}"
        if isinstance(function, ast.Lambda)
        else textwrap.dedent(source),
        mapped=_mapping(mapped, name),
        axis=_axis(program, mapped),
        rows=rows,
        given=", ".join(["*state" if count > 1 else "state", *arguments[count:]]),
        paired="results if isinstance(results, tuple) else (results, {})"
        if count == 1
        else f"tuple(results[:{count}]), results[{count}:]",
    )


def _step(program: ParsedFile, path: Path) -> MappedCall:
    for mapped in program.mapped:
        calls = program.calls(*program.reached(mapped.function))
        if any(program.last_called(call) in _DIFFERENTIATE for call in calls):
            return mapped
    raise ConfigError(
        f"{path} has no pmap or shard_map of a function that computes gradients; for other steps, "
        "use verify --step FILE.py:name --reference FILE.py:name"
    )


def _parts(names: list[str], path: Path) -> dict[str, list[str]]:
    """Return the names of a step's arguments by role: state, batch, and possibly key."""
    first = next((n for n, name in enumerate(names) if n and BATCH.match(name)), None)
    if first is None:
        raise ConfigError(
            f"the arguments {', '.join(names)} of the step in {path} do not show which is the "
            "batch: name it batch, images, labels, x or y"
        )
    keys = [name for name in names[first:] if KEY_NAMES.search(name)]
    parts = {"state": names[:first], "batch": [each for each in names[first:] if each not in keys]}
    return {**parts, "key": keys} if keys else parts


def _stacks(program: ParsedFile, node: ast.stmt) -> bool:
    """Whether a statement creates values with a copy per device."""
    return any(program.called(call) in REPLICATES | PMAP for call in program.calls(node))


def _makes(node: ast.stmt) -> list[str]:
    """Return the names that a top-level statement defines."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    return targets(node) if isinstance(node, ast.Assign | ast.AnnAssign) else []


def _copies(
    program: ParsedFile, text: str, made: dict[str, ast.stmt], names: set[str]
) -> list[str]:
    """Return the top-level statements that the names depend on, in file order."""
    needed: set[ast.stmt] = set()
    waiting = [made[name] for name in names if name in made]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [made[name] for name in names_in(node) if name in made]
    lines = text.splitlines()
    copies = [] if "jax" in made else ["import jax"]
    for node in program.tree.body:
        if node in needed:
            decorators = getattr(node, "decorator_list", [])
            first = decorators[0].lineno if decorators else node.lineno
            copies += ["\n"] * isinstance(node, ast.FunctionDef | ast.ClassDef)
            copies.append("\n".join(lines[first - 1 : node.end_lineno]))
    return copies


def _mapping(mapped: MappedCall, name: str) -> str:
    """Return the expression that maps and compiles the step, from decorators or a call."""
    decorators = getattr(mapped.function, "decorator_list", [])
    if mapped.call in decorators:
        for each in reversed(decorators):
            name = f"{ast.unparse(each)}({name})"
    else:
        name = ast.unparse(mapped.call).replace(ast.unparse(mapped.function), name)
    return name if mapped.kind in PMAP else f"jax.jit({name})"


def _axis(program: ParsedFile, mapped: MappedCall) -> str:
    """Return the step's reduction axis as an argument of `vmap`; empty if there is none."""
    if mapped.kind in PMAP and "axis_name" in mapped.options:
        return f", axis_name={ast.unparse(mapped.options['axis_name'])}"
    for call in program.calls(*program.reached(mapped.function)):
        if REDUCES.match(program.last_called(call)):
            named = [each.value for each in call.keywords if each.arg == "axis_name"]
            return f", axis_name={ast.unparse([*named, *call.args[1:], call][0])}"
    return ""

"""Rules on names and calls, each looked up in the libraries that are installed."""

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

from replicax.lint.finding import NOTE, Report
from replicax.lint.program import Program

LIBRARIES = ("jax", "flax", "optax", "numpy", "equinox", "haiku", "chex", "orbax")
_DISTRIBUTIONS = {"haiku": "dm-haiku", "orbax": "orbax-checkpoint"}
_GUARDS = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"}
_MISSING = object()


def check_names(program: Program, report: Report) -> list[str]:
    """Report names and calls that the libraries do not take; return those not installed.

    Each name once, where it is first written, with how often.
    """
    absent: dict[str, None] = {}
    gone: dict[str, list[ast.AST]] = {}
    for node, name in _written(program):
        library = name.partition(".")[0]
        if library not in LIBRARIES or _is_guarded(program, node):
            continue
        if not _installed(library):
            absent[library] = None
            continue
        lost = _lost(name)
        if lost and not report.ignores("removed-api", getattr(node, "lineno", 1)):
            gone.setdefault(lost, []).append(node)
        old = _deprecation(name)
        if old:
            report.add("old-api", node, old[0], old[1], NOTE)
    for name, nodes in gone.items():
        first = min(nodes, key=lambda node: getattr(node, "lineno", 0))
        times = f" ({len(nodes)} times in this file)" if len(nodes) > 1 else ""
        reason, fix = _told(name)
        report.add("removed-api", first, f"{reason}{times}", fix)
    for call in program.calls(program.tree):
        _check_call(program, call, report)
    return list(absent)


def _written(program: Program) -> Iterator[tuple[ast.AST, str]]:
    """Yield the names of libraries that a file imports or reads, the longest of a dotted one."""
    inner = {id(node.value) for node in program.nodes if isinstance(node, ast.Attribute)}
    for node in program.nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (
                (node, f"{node.module}.{alias.name}") for alias in node.names if alias.name != "*"
            )
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            name = program.name(node)
            if name:
                yield node, name


def _is_guarded(program: Program, node: ast.AST) -> bool:
    """Whether a file provides for another version: by `try`, `hasattr`, or the version."""
    for outer in program.around(node):
        if isinstance(outer, ast.Try):
            caught = {
                getattr(each, "id", "")
                for handler in outer.handlers
                for each in ast.walk(handler.type or ast.Name("Exception", ast.Load()))
            }
            if caught & _GUARDS:
                return True
        if isinstance(outer, ast.If | ast.IfExp):
            test = ast.unparse(outer.test)
            if "hasattr" in test or "version" in test.lower():
                return True
    return False


@functools.cache
def _installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


@functools.cache
def _module(name: str) -> types.ModuleType | None:
    """Return a module of a library; None where there is none, or it cannot be imported here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception:  # whatever it needs
        return None


@functools.cache
def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def _attribute(module: types.ModuleType, name: str) -> tuple[Any, str, str]:
    """Return an attribute, what its absence says, and what its use warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            value = getattr(module, name)
        except AttributeError as error:
            return _MISSING, str(error), ""
        except Exception:
            return None, "", ""
    old = [each for each in caught if issubclass(each.category, DeprecationWarning)]
    return value, "", str(old[0].message) if old else ""


@functools.cache
def _resolved(name: str) -> tuple[Any, str, str, str]:
    """Return what a full name is, the part of it that is lost, and why; what its use warns of."""
    path, *rest = name.split(".")
    value: Any = _module(path)
    for part in rest:
        if not isinstance(value, types.ModuleType):
            value = getattr(value, part, None) if isinstance(value, type) else None
            continue
        longer = f"{path}.{part}"
        found, why, old = _attribute(value, part)
        if found is _MISSING:
            if not _exists(longer):
                return None, longer, why, ""
            found = _module(longer)
        if old:
            return found, "", "", f"{longer}|{old}"
        path, value = longer, found
    return value, "", "", ""


def _lost(name: str) -> str:
    return _resolved(name)[1]


def _told(name: str) -> tuple[str, str]:
    """Return why a name is lost, and what to write, as far as its library says."""
    library = name.partition(".")[0]
    why = _resolved(name)[2]
    said = " ".join(why.split()) if "has no attribute" not in why else ""
    version = importlib.metadata.version(_DISTRIBUTIONS.get(library, library))
    return f"{library} {version} has no {name}", _INSTEAD.get(name) or said or _instead(name)


_PUT = "jax.device_put(value, jax.NamedSharding(mesh, jax.P()))"
_INSTEAD = {
    "jax.device_put_replicated": f"write {_PUT} with jit or shard_map",
    "jax.device_put_sharded": "write jax.device_put(numpy.stack(shards), jax.NamedSharding(mesh, "
    "jax.P('data')))",
    "jax.experimental.maps": "write jax.shard_map, and jax.sharding.Mesh",
    "jax.experimental.global_device_array": "write jax.make_array_from_callback",
    "jax.sharding.PositionalSharding": "write jax.NamedSharding(mesh, jax.P('data'))",
    "jax.sharding.PmapSharding": "write jax.NamedSharding(mesh, jax.P('data'))",
}
"""Where a library does not say what to write, nor has the name elsewhere; or says less."""
_PLACES = ("jax.tree", "jax.sharding", "jax", "jax.lax", "jax.numpy", "jax.experimental")


def _instead(name: str) -> str:
    last = name.rpartition(".")[2]
    library = name.partition(".")[0]
    others = [f"{place}.{last}" for place in (*_PLACES, library)]
    others.insert(0, f"jax.tree.{last.removeprefix('tree_')}")
    for other in others:
        value, lost, *_ = _resolved(other)
        if not lost and value is not None:
            return f"write {other}"
    return "see the library's changelog"


def _deprecation(name: str) -> tuple[str, str] | None:
    *_, old = _resolved(name)
    if not old:
        return None
    where, _, message = old.partition("|")
    return f"{where} is deprecated", " ".join(message.split())


def _check_call(program: Program, call: ast.Call, report: Report) -> None:
    """Report a call whose arguments its function does not take."""
    name = program.called(call)
    library = name.partition(".")[0]
    if library not in LIBRARIES or not _installed(library) or _is_guarded(program, call):
        return
    value, lost, *_ = _resolved(name)
    if lost or not (callable(value) or isinstance(value, types.ModuleType)):
        return
    if isinstance(value, types.ModuleType):
        report.add("bad-call", call, f"{name} is a module: calling it fails", "call what is in it")
        return
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    if starred or any(each.arg is None for each in call.keywords):
        return
    partly = program.name(call.func) == "functools.partial"
    given = call.args[1:] if partly else call.args
    signature = _signature(value)
    if signature is None:
        return
    bind = signature.bind_partial if partly else signature.bind
    try:
        bind(*given, **{each.arg: each.value for each in call.keywords if each.arg})
    except TypeError as error:
        version = importlib.metadata.version(_DISTRIBUTIONS.get(library, library))
        report.add(
            "bad-call",
            call,
            f"{name} of {library} {version} takes no such arguments: {error}",
            f"its arguments are {_shortened(signature)}",
        )


@functools.cache
def _signature(function: Any) -> inspect.Signature | None:
    """Return what a function takes, or a class; None where it does not tell."""
    try:
        found = inspect.signature(function)
        if isinstance(function, type) and list(found.parameters) == ["args", "kwargs"]:
            # Its metaclass hands all on, as Flax's does.
            own = inspect.signature(function.__init__)  # type: ignore[misc]
            found = own.replace(parameters=list(own.parameters.values())[1:])
    except (ValueError, TypeError):
        return None
    return found


def _shortened(signature: inspect.Signature) -> str:
    counts = Counter(each.kind for each in signature.parameters.values())
    names = ", ".join(signature.parameters)
    return names if sum(counts.values()) <= 12 else f"{names[:70]}..."

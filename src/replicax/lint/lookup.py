"""Rules on names and calls, checked against the installed libraries."""

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from replicax.lint.parsed import NOTE_LEVEL, ParsedFile, keywords, line_of, names_in

LIBRARIES = ("jax", "flax", "optax", "numpy", "equinox", "haiku", "chex", "orbax")
_DISTRIBUTIONS = {"haiku": "dm-haiku", "orbax": "orbax-checkpoint"}
_GUARDS = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"}


def check_names(program: ParsedFile) -> list[str]:
    """Report names and calls that the libraries do not support; return libraries not installed.

    Each name is reported once, at its first use, with the number of uses.
    """
    absent: dict[str, None] = {}
    gone: dict[str, list[ast.AST]] = {}
    for node, name in _written(program):
        library = name.partition(".")[0]
        if library not in LIBRARIES or _is_guarded(program, node):
            continue
        if not _is_module(library):
            absent[library] = None
            continue
        resolved = _resolved(name)
        if resolved.lost and not program.ignores("removed-api", line_of(node)):
            gone.setdefault(resolved.lost, []).append(node)
        if resolved.deprecated:
            fix = " ".join(resolved.warning.split())
            program.report("old-api", node, f"{resolved.deprecated} is deprecated", fix, NOTE_LEVEL)
    for name, nodes in gone.items():
        first = min(nodes, key=line_of)
        times = f" ({len(nodes)} times in this file)" if len(nodes) > 1 else ""
        reason, fix = _told(name)
        program.report("removed-api", first, f"{reason}{times}", fix)
    for call in program.calls():
        _check_call(program, call)
    return list(absent)


def _written(program: ParsedFile) -> Iterator[tuple[ast.AST, str]]:
    """Yield the library names that a file imports or uses; for dotted names only the longest."""
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


def _is_guarded(program: ParsedFile, node: ast.AST) -> bool:
    """Whether a file handles other versions with `try`, `hasattr` or a version check."""
    for outer in program.around(node):
        if isinstance(outer, ast.Try):
            caught = [each.type or ast.Name("Exception") for each in outer.handlers]
            if names_in(*caught) & _GUARDS:
                return True
        if isinstance(outer, ast.If | ast.IfExp):
            test = ast.unparse(outer.test)
            if "hasattr" in test or "version" in test.lower():
                return True
    return False


@functools.cache
def _module(name: str) -> types.ModuleType | None:
    """Return a module of a library; None if it does not exist or cannot be imported here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception:  # missing dependencies
        return None


class _Resolved(NamedTuple):
    value: Any = None
    """The object that a full name refers to; None if unknown."""
    lost: str = ""
    """The part of the name that its library no longer has, and the library's message."""
    why: str = ""
    deprecated: str = ""
    """The part of the name that is deprecated, and the warning."""
    warning: str = ""


@functools.cache
def _resolved(name: str) -> _Resolved:
    """Look up a full name in its library, part by part."""
    path, *rest = name.split(".")
    value: Any = _module(path)
    for part in rest:
        if not isinstance(value, types.ModuleType):
            try:
                value = getattr(value, part, None) if isinstance(value, type) else None
            except Exception:  # computed by its class
                value = None
            continue
        longer = f"{path}.{part}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                attribute = getattr(value, part)
            except AttributeError as error:
                attribute = _module(longer)
                if attribute is None and not _is_module(longer):
                    return _Resolved(None, longer, str(error))
            except Exception:  # raised by a lazy module with missing dependencies
                attribute = None
        for raised in caught:
            if issubclass(raised.category, DeprecationWarning):
                return _Resolved(attribute, "", "", longer, str(raised.message))
        path, value = longer, attribute
    return _Resolved(value)


@functools.cache
def _is_module(name: str) -> bool:
    """Return whether a library has a module, even if it cannot be imported here."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def _told(name: str) -> tuple[str, str]:
    """Return why a name is gone and its replacement, as far as its library says."""
    why = _resolved(name).why
    said = " ".join(why.split()) if "has no attribute" not in why else ""
    return f"{_versioned(name)} has no {name}", _INSTEAD.get(name) or said or _instead(name)


def _versioned(name: str) -> str:
    library = name.partition(".")[0]
    return f"{library} {importlib.metadata.version(_DISTRIBUTIONS.get(library, library))}"


_INSTEAD = {
    "jax.experimental.maps": "write jax.shard_map, and jax.sharding.Mesh",
    "jax.experimental.global_device_array": "write jax.make_array_from_callback",
    "jax.sharding.PositionalSharding": "write jax.NamedSharding(mesh, jax.P('data'))",
    "jax.sharding.PmapSharding": "write jax.NamedSharding(mesh, jax.P('data'))",
}
"""Replacements that a library does not mention and that have a different name."""
_PLACES = ("jax.tree", "jax.sharding", "jax", "jax.lax", "jax.numpy", "jax.experimental")


def _instead(name: str) -> str:
    library, last = name.partition(".")[0], name.rpartition(".")[2]
    others = [f"{place}.{last}" for place in (*_PLACES, library)]
    for other in (f"jax.tree.{last.removeprefix('tree_')}", *others):
        if _resolved(other).value is not None:
            return f"write {other}"
    return "see the library's changelog"


def _check_call(program: ParsedFile, call: ast.Call) -> None:
    """Report a call whose arguments its function does not take."""
    name = program.called(call)
    library = name.partition(".")[0]
    if library not in LIBRARIES or not _is_module(library) or _is_guarded(program, call):
        return
    value = _resolved(name).value
    if isinstance(value, types.ModuleType):
        program.report(
            "bad-call", call, f"{name} is a module: calling it fails", "call one of its functions"
        )
        return
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    if starred or None in keywords(call):
        return
    partly = program.name(call.func) == "functools.partial"
    given = call.args[1:] if partly else call.args
    signature = _signature(value) if callable(value) else None
    if signature is None:
        return
    bind = signature.bind_partial if partly else signature.bind
    try:
        bind(*given, **{each.arg: each.value for each in call.keywords if each.arg})
    except TypeError as error:
        names = ", ".join(signature.parameters)
        program.report(
            "bad-call",
            call,
            f"{name} of {_versioned(name)} takes no such arguments: {error}",
            f"its arguments are {names if len(names) <= 120 else names[:120] + ' ...'}",
        )


@functools.cache
def _signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a function or class; None if unknown."""
    try:
        signature = inspect.signature(function)
        if isinstance(function, type) and list(signature.parameters) == ["args", "kwargs"]:
            # Its metaclass forwards all arguments, as Flax's does.
            return _without_self(function.__init__)  # type: ignore[misc]
        return signature
    except (ValueError, TypeError):
        return _compiled_signature(function)


def _compiled_signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a nanobind class such as `jax.NamedSharding`, from its docstring."""
    text = getattr(getattr(function, "__init__", None), "__doc__", None) or ""
    if not text.startswith("__init__(self, ") or "*" in text or "\n" in text:
        return None
    made: dict[str, Any] = {}
    try:
        exec(f"from __future__ import annotations\ndef {text}: ...", made)
    except Exception:  # a default that is not an expression: <object at 0x7f...>
        return None
    return _without_self(made["__init__"])


def _without_self(method: Any) -> inspect.Signature:
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])

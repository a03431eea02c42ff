"""Check calls of the public API: names of arguments, and values against their annotations.

Whole numbers and numbers may be those of other libraries, such as NumPy's; the result is Python's.
Annotations that this module does not know accept every value.
"""

import collections.abc
import contextlib
import functools
import inspect
import math
import numbers
import operator
import os
import types
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from replicax.errors import ConfigError, nearest_name
from replicax.text.other_names import ARGUMENTS, VALUES, loggers, names_of_row

_T = TypeVar("_T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Range:
    """The numbers from `least` to `most`, or above `above`; NaN is never one of them."""

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf

    def fault(self, value: float) -> str | None:
        """Say which limit `value` exceeds, and the fix."""
        if not value > self.above and self.above > -math.inf:
            return f"it must be above {self.above:g}: raise it"
        if not value >= self.least:
            return f"it must be at least {self.least:g}: raise it"
        if not value <= self.most:
            most = f"{self.most:,}" if isinstance(self.most, int) else f"{self.most:g}"
            return f"it must be at most {most}: lower it"
        return None


_NUMPY_BOOLS = ("numpy.bool", "numpy.bool_")
Natural = Annotated[int, Range(0, 2**63 - 1)]
"""A number that may be 0."""
Count = Annotated[int, Range(1, 2**63 - 1)]
"""A number of at least 1."""
Int32Count = Annotated[int, Range(1, 2**31 - 1)]
"""Rows of a batch, which int32 numbers."""
Devices = Annotated[int, Range(1, 4096)]
"""Devices of a process; a CPU simulates each in a thread of its own."""
Seed = Annotated[int, Range(0, 2**32 - 1)]
"""A seed, as an unsigned number of 32 bits."""
Positive = Annotated[float, Range(above=0)]
"""A number above 0."""
NotNegative = Annotated[float, Range(0, 1e18)]
"""A number of 0 or above."""


def typed_but(*skipped: str) -> Callable[[_T], _T]:
    """Decorate as `typed` does, except for arguments that the function checks better itself."""
    return lambda target: _typed(target, frozenset(skipped))


def typed(target: _T) -> _T:
    """Decorate a function, or a class for its `__init__`: its arguments are those that it declares.

    Raises:
        ConfigError: when called with an argument that it does not have, or lacks, or of another
            type, or outside of its range.
    """
    if isinstance(target, type):
        target.__init__ = typed(target.__init__)  # type: ignore[misc]
        return target
    return _typed(target, frozenset())


def answered(target: _T) -> _T:
    """Decorate as `typed` does, without a look at the values: for what is called in every step."""
    if isinstance(target, type):
        target.__init__ = answered(target.__init__)  # type: ignore[misc]
        return target
    signature = inspect.signature(target)

    @functools.wraps(target)
    def run(*arguments: Any, **named: Any) -> Any:
        try:
            return target(*arguments, **named)
        except TypeError:
            bind(target.__qualname__, signature, arguments, named)
            raise

    return with_signature(run, signature)  # type: ignore[no-any-return]


def _typed(target: _T, skipped: Set[str]) -> _T:
    signature, hints = inspect.signature(target), functools.cache(_hints)

    @functools.wraps(target)
    def checked(*arguments: Any, **named: Any) -> Any:
        bound = bind(target.__qualname__, signature, arguments, named)
        for name, hint in hints(target).items():
            if name in bound.arguments and name not in skipped:
                bound.arguments[name] = fitted(name, hint, bound.arguments[name])
        return target(*bound.args, **bound.kwargs)

    return with_signature(checked, signature)  # type: ignore[no-any-return]


class _Text(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def with_signature(function: Any, signature: inspect.Signature) -> Any:
    """Return `function`, of which `help` shows this signature as it is written: `int | None`.

    Python shows `Optional[Annotated[int, Range(...)]]`, and each class with its module.
    """
    known = signature.parameters.values()
    shown = [each.replace(annotation=_text(each.annotation)) for each in known]
    returns = _text(signature.return_annotation)
    function.__signature__ = signature.replace(parameters=shown, return_annotation=returns)
    return function


def _text(hint: Any) -> Any:
    return hint if hint is inspect.Signature.empty else _Text(_written(hint))


def _written(hint: Any) -> str:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _written(inner[0])
    if kind in (Union, types.UnionType):
        return " | ".join(map(_written, inner))
    if kind is Literal:
        return f"Literal[{', '.join(map(repr, inner))}]"
    if isinstance(hint, list):  # the arguments of a Callable
        return f"[{', '.join(map(_written, hint))}]"
    if inner:
        return f"{kind.__name__}[{', '.join(map(_written, inner))}]"
    if hint in (None, ..., types.NoneType):
        return "..." if hint is ... else "None"
    name = getattr(hint, "__name__", hint)
    return str(getattr(hint, "__forward_arg__", name))  # a name in quotes, in the source


def bind(
    function: str, signature: inspect.Signature, arguments: Sequence[Any], named: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments of a call by name.

    Raises:
        ConfigError: `function` cannot be called so; it says what to write instead.
    """
    with contextlib.suppress(TypeError):
        return signature.bind(*arguments, **named)
    owner, _, method = function.removesuffix(".__init__").rpartition(".")
    call = f"{'dp' if owner == 'DataParallel' else owner}.{method}" if owner else method
    parameters = {name: p for name, p in signature.parameters.items() if name != "self"}
    for word in named:
        if word not in parameters:
            verb = not call[:1].isupper() or call in ("DataParallel", "Run")
            said = _instead(call, word, named[word], parameters, elsewhere=verb)
            raise ConfigError(f"{call} has no argument {said}")
    arguments = arguments[len(signature.parameters) - len(parameters) :]
    given = ", ".join([*(type(each).__name__ for each in arguments), *map("{}=...".format, named)])
    wanted = [
        f"{name}=..." if p.kind is p.KEYWORD_ONLY else name
        for name, p in parameters.items()
        if p.kind is not p.KEYWORD_ONLY or p.default is p.empty
    ]
    others = ", and others by name" if len(wanted) < len(parameters) else ""
    if len(arguments) > len(wanted) and sum(hasattr(value, "shape") for value in arguments) > 1:
        others = ", with the arrays in one dict"
    raise ConfigError(f"{call} got ({given}): write {call}({', '.join(wanted)}){others}")


def _instead(call: str, word: str, value: Any, known: Mapping[str, Any], *, elsewhere: bool) -> str:
    """Return an argument that is not in `known`, and what to write for it, if only `elsewhere`."""
    shown, here, synonyms, there = _shown(value), list[str](), list[str](), list[str]()
    for where, written, words in ARGUMENTS:
        if word not in names_of_row(written, words):
            continue
        if where == f"rx.{call}":
            return f"{word}={shown}: {written}"
        if written.partition("=")[0] in known:
            here.append(written)
        else:
            synonyms += [f"{name}={{}}" for name in words.split() if name in known]
            there.append(f"write {where.replace('{}', written)}" if written else where)
    if here or synonyms or (there and elsewhere):
        given = VALUES.get(value, value) if isinstance(value, str) else value
        text = _shown(given) if isinstance(value, int | float | str) else "..."
        text = loggers(word, value) or text
        line = [*(f"write {each}" for each in (*here, *synonyms)), *there][0]
        return f"{word}={shown}: {line.replace('{}', text)}"
    if nearest := nearest_name(word, known):
        return f"{word}={shown}: did you mean {nearest}=...?"
    return f"{word}={shown}; it takes {', '.join(known) or 'none'}: rename it, or leave it out"


def fitted(name: str, hint: Any, value: Any) -> Any:
    """Return `value` as the type `hint`, which it must have; `name` is for the message."""
    try:
        return _fitted(hint, value)
    except _UnfitError as unfit:
        between = " " if name.startswith("--") else "="
        raise ConfigError(f"{name}{between}{_shown(value)}; {unfit}") from None


def _shown(value: Any) -> str:
    shown = f"{value:g}" if isinstance(value, float) else repr(value)
    return shown if len(shown) <= 80 and "\n" not in shown else f"a {type(value).__name__}"


def check_ranges(options: Any, prefix: str) -> None:
    """Check the fields of a dataclass, and of those in it, whose annotations have a `Range`.

    Args:
        options: the dataclass.
        prefix: what stands before a field's name where the user gives it: `--`.
    """
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        value = getattr(options, name, None)
        if is_dataclass(value):
            check_ranges(value, prefix)
        elif "Range(" in repr(hint):
            fitted(f"{prefix}{name.replace('_', '-')}" if prefix else name, hint, value)


class _UnfitError(Exception):
    """A rule that a value breaks, and the fix."""


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    known = get_type_hints(target, include_extras=True)
    return {name: hint for name, hint in known.items() if name != "return"}


def _fitted(hint: Any, value: Any) -> Any:
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _in_range(_fitted(inner[0], value), inner[1:])
    if kind in (Union, types.UnionType):
        return _one_of(inner, value)
    if kind is Literal:
        # Which name is the nearest, the function says: an unknown one is its to refuse.
        return _is(isinstance(value, str), value, "a str")
    if kind in _CONTAINERS:
        return _contained(kind, inner, value)
    if hint in _SCALARS:
        return _SCALARS[hint](value)
    if hint is Callable or kind is collections.abc.Callable:
        return _is(callable(value), value, "callable")
    if isinstance(kind, type) and issubclass(kind, Generic):
        hint = kind
    is_class = isinstance(hint, type) and hint is not Any
    if is_class and not getattr(hint, "_is_protocol", False):
        return _is(isinstance(value, hint), value, f"a {hint.__name__}", _made(hint))
    return value


def _in_range(value: Any, marks: Sequence[Any]) -> Any:
    for mark in marks:
        if isinstance(mark, Range) and value is not None and (fault := mark.fault(value)):
            raise _UnfitError(fault)
    return value


def _one_of(hints: Sequence[Any], value: Any) -> Any:
    """Return `value` as the first of `hints` that fits; else raise what the best one says."""
    if value is None and type(None) in hints:
        return None
    faults = []
    for hint in hints:
        if hint is not type(None):
            try:
                return _fitted(hint, value)
            except _UnfitError as unfit:
                faults.append(str(unfit))
    if len(faults) == 1:
        raise _UnfitError(faults[0])
    names = [name for fault in faults if (name := fault.partition("it must be ")[2])]
    raise _UnfitError(
        f"it must be {' or '.join(each.partition(':')[0] for each in names)}: change it"
    )


def _contained(kind: Any, inner: Sequence[Any], value: Any) -> Any:
    if issubclass(kind, Mapping):
        return _is(isinstance(value, Mapping), value, "a dict")
    if isinstance(value, str | bytes) or not isinstance(value, collections.abc.Sequence):
        fits = not isinstance(inner[0], type) or isinstance(value, inner[0])
        raise _UnfitError(f"it must be a list: {'put it in brackets' if fits else _made(inner[0])}")
    return [_fitted(inner[0], each) for each in value]


def _is_bool(value: Any) -> bool:
    kind = type(value)  # this module is imported where NumPy is not
    return isinstance(value, bool) or f"{kind.__module__}.{kind.__name__}" in _NUMPY_BOOLS


def _whole(value: Any) -> int:
    if not _is_bool(value):
        try:
            return operator.index(value)
        except TypeError:
            pass
    real = isinstance(value, numbers.Real) and not _is_bool(value)
    same = real and float(value).is_integer()
    fix = "put arrays of the same rows in one dict" if getattr(value, "shape", ()) else "change it"
    raise _UnfitError(f"it must be a whole number: {f'pass {int(value)}' if same else fix}")


def _number(value: Any) -> float:
    if not isinstance(value, str | bytes) and not _is_bool(value):
        try:
            if not math.isnan(number := float(value)):
                return number
        except (TypeError, ValueError, OverflowError):
            pass
    raise _UnfitError("it must be a number: change it")


def _flag(value: Any) -> bool:
    return bool(_is(_is_bool(value), value, "True or False"))


def _path(value: Any) -> Any:
    return _is(isinstance(value, os.PathLike), value, "a path")


def _is(fits: bool, value: Any, expected: str, fix: str = "change it") -> Any:
    if not fits:
        raise _UnfitError(f"it must be {expected}: {fix}")
    return value


def _made(kind: type[Any]) -> str:
    made = _MAKES.get(kind.__name__)
    return f"pass {made}" if made else "change it"


_SCALARS: dict[Any, Callable[[Any], Any]] = {int: _whole, float: _number, bool: _flag, Path: _path}
_CONTAINERS = (dict, Mapping, collections.abc.Mapping, list, Sequence, collections.abc.Sequence)
_MAKES = {
    "Device": "jax.devices()[:4]",
    "DataParallel": "rx.DataParallel(loss, optimizer)",
    "Guard": "rx.Guard(max_bad_steps=5)",
    "Hook": "an object, as rx.hooks.EarlyStopping() is",
    "Job": "job = rx.initialize()",
    "Mesh": "rx.make_mesh(4)",
    "Saving": "rx.Saving(every=1000)",
    "TrainState": "state = dp.init(model)",
}
"""By the name of a class, what makes an object of it."""

"""A recipe, made again from its fields as `config.json` has them."""

import dataclasses
import enum
import types
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from replicax.errors import ConfigError
from replicax.recipes.recipe import recipe_name


def recipe_of(recipe_class: type[Any], fields: Mapping[str, Any]) -> Any:
    """The recipe with these fields; those that it did not have then are as by default.

    Args:
        recipe_class: from `find_recipe`.
        fields: name -> JSON value, as written of `dataclasses.asdict`.

    Raises:
        ConfigError: one cannot be made of its JSON, or is no field any more.
    """
    name = recipe_name(recipe_class)
    known = [field.name for field in dataclasses.fields(recipe_class)]
    if unknown := [field for field in fields if field not in known]:
        raise ConfigError(
            f"the run's recipe {name} had a field {unknown[0]!r}, and this one has none; go back "
            "to its code, or give rx.load dp= and state="
        )
    try:
        return _made(recipe_class, fields)
    except (TypeError, ValueError, NameError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the run's recipe {name} cannot be made from its config.json ({error}); give rx.load "
            "dp= and state="
        ) from error


def _made(dataclass: type[Any], values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(dataclass)
    given = [field.name for field in dataclasses.fields(dataclass) if field.init]
    return dataclass(
        **{name: _typed(name, hints[name], values[name]) for name in given if name in values}
    )


def _typed(name: str, hint: Any, value: Any) -> Any:
    """The value of type `hint` that was written as `value`; raises ValueError."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind in (Union, types.UnionType):
        for each in inner:
            try:
                return _typed(name, each, value)
            except ValueError:
                continue
    elif hint is Any or (kind is Literal and value in inner):
        return value
    elif kind is tuple and isinstance(value, list):
        if inner[1:] == (...,):
            inner = inner[:1] * len(value)
        return tuple(_typed(name, *pair) for pair in zip(inner, value, strict=True))
    elif kind is list and isinstance(value, list):
        return [_typed(name, inner[0], each) for each in value]
    elif kind is dict and isinstance(value, dict) and inner[0] is str:
        return {key: _typed(name, inner[1], each) for key, each in value.items()}
    elif isinstance(hint, type):
        return _plain(name, hint, value)
    raise ValueError(f"{name}={value!r} is no {getattr(hint, '__name__', hint)}")


def _plain(name: str, hint: type[Any], value: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _made(hint, value)
    if issubclass(hint, PurePath) and isinstance(value, str):
        return hint(value)
    if issubclass(hint, enum.Enum):
        for member in hint:
            if value in (str(member), member.value):
                return member
    numbers = (int, float) if hint is float else hint
    if isinstance(value, numbers) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ValueError(f"{name}={value!r} is no {hint.__name__}")
